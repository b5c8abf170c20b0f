"""Measures elastic against plain DDP and torchrun on this machine, in the same run."""
