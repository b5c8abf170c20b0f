"""Benchmarks that compare elastic with plain DDP and torchrun on this machine, in the same run."""
