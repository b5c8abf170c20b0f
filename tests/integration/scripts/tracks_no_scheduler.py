"""Lowers its rate by a scheduler that it does not track: a newcomer begins with the first rate."""

import torch
from toy import Toy

toy = Toy(samples=4800)
scheduler = torch.optim.lr_scheduler.StepLR(toy.optimizer, step_size=4, gamma=0.5)
toy.train(epochs=1000, pace_s=0.05, in_step=lambda _step: scheduler.step())
