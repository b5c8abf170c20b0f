"""Tries to train on data without a length."""

import itertools

from torch.utils.data import IterableDataset

import elastic


class Stream(IterableDataset):
    def __iter__(self):
        return itertools.count()


elastic.init()
elastic.DataLoader(Stream(), batch_size=4)
