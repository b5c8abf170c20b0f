"""Lowers its learning rate by an untracked scheduler: a newcomer begins with the first rate."""

import torch
from toy import Toy

toy = Toy(samples=4800)
scheduler = torch.optim.lr_scheduler.LambdaLR(toy.optimizer, lambda step: 1.0 / (1.0 + step))
toy.train(epochs=1000, pace_s=0.05, in_step=lambda _step: scheduler.step())
