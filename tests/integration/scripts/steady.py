"""Trains the toy without faults; options set its length, its data and its model."""

import argparse

from toy import Toy

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--pace-s", type=float, default=0.0)
parser.add_argument("--samples", type=int, default=48)
parser.add_argument("--features", type=int, default=4)
parser.add_argument("--name", default="model")
parser.add_argument("--optimizer", default="SGD")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--show-rate", action="store_true")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--drop-last", action="store_true")
options = parser.parse_args()

toy = Toy(
    samples=options.samples,
    features=options.features,
    name=options.name,
    optimizer=options.optimizer,
    lr=options.lr,
    batch_size=options.batch_size,
    drop_last=options.drop_last,
)
toy.train(epochs=options.epochs, pace_s=options.pace_s)
if options.show_rate:
    print(f"rate {toy.optimizer.param_groups[0]['lr']}")
print(f"weights {toy.model.weight.sum().item():.6f}")
