"""Adds a layer in its fifth step, to grow its network; DDP does not know the layer."""

from torch import nn
from toy import Toy

toy = Toy(module=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))


def grow(step):
    if step.index == 4:
        toy.model.module.append(nn.Linear(1, 1))
        toy.optimizer.add_param_group({"params": toy.model.module[-1].parameters()})


toy.train(in_step=grow)
