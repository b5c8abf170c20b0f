"""Asks torch for its rank while there is no group yet, as scripts for torchrun do."""

import torch.distributed as dist

import elastic

elastic.init()
print(dist.get_rank())
