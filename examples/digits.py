"""Handwritten digits with a small conv net: an ordinary training script that survives lost workers.

    elastic run --nproc-per-node 3 examples/digits.py
    python examples/digits.py                          # the same, as a world of one
    elastic run --nproc-per-node 3 examples/digits.py --epochs 60 --lr 0.01

The 1,797 images of 8 x 8 pixels come with scikit-learn; nothing is downloaded. Kill a worker while
the script runs: the others go on with the step that they were at, and a spare takes its place.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=30, help="times to go through the images")
    parser.add_argument("--batch-size", type=int, default=16, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one worker")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and of the sample order"
    )
    return parser.parse_args()


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test data; every fifth image is for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    images, labels = (tensor.to(device) for tensor in data.tensors)
    model.eval()
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    options = parse()
    session = elastic.init()  # a warm spare waits here
    train, test = load()
    torch.manual_seed(options.seed)
    model = session.distribute(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    session.scale_lr(optimizer, elastic.LinearScaling(reference_world=1, warmup_steps=50))
    session.track(model=model, optimizer=optimizer, scheduler=scheduler)
    data = elastic.DataLoader(train, batch_size=options.batch_size, seed=options.seed)

    for step in session.steps(data, epochs=options.epochs):
        with step:  # leaving this block commits the step
            if scheduler.last_epoch < step.epoch:  # once an epoch, whatever the world size
                scheduler.step()
            for images, labels in step.batches():
                loss = nn.functional.cross_entropy(model(images), labels)
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step.report(loss=loss)

    if session.rank == 0:
        result = accuracy(model.module, test, session.device)
        print(f"test accuracy {result:.4f} after {session.committed} steps")


if __name__ == "__main__":
    main()
