"""Trains a model with BatchNorm, which refuses a batch of a single sample."""

import argparse

from torch import nn
from toy import Toy

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, required=True)
parser.add_argument("--epochs", type=int, default=2)
options = parser.parse_args()

module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
toy = Toy(samples=options.samples, module=module)
toy.train(epochs=options.epochs)
