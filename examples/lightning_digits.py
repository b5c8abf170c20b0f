"""Handwritten digits with Lightning: its Trainer keeps its loop, and survives lost workers.

    elastic run --nproc-per-node 3 examples/lightning_digits.py
    python examples/lightning_digits.py                # the same, as a world of one

The lines that differ from a script for one device have a comment. It needs
`pip install 'elastic-ddp[examples,lightning]'`.
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
import elastic.lightning  # 1


class Digits(pl.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        images, labels = batch
        right = self.net(images).argmax(dim=1) == labels
        self.log("accuracy", right.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and validation data; every fifth image is for validation."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    held = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held], labels[~held]), TensorDataset(images[held], labels[held])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15, help="times to go through the images")
    parser.add_argument("--directory", default=".", help="where Lightning writes")
    options = parser.parse_args()
    session = elastic.init()  # 2
    pl.seed_everything(0)
    train, held = load()
    trainer = pl.Trainer(
        strategy=elastic.lightning.ElasticStrategy(session),  # 3
        max_epochs=options.epochs,
        default_root_dir=options.directory,
        enable_progress_bar=False,
        log_every_n_steps=10,
        callbacks=[pl.callbacks.EarlyStopping("accuracy", mode="max", patience=5)],
    )
    data = elastic.DataLoader(train, batch_size=32, global_batch=96, seed=0)  # 4
    trainer.fit(Digits(lr=0.1), data, DataLoader(held, 64))
    if session.rank == 0:
        accuracy = trainer.callback_metrics["accuracy"].item()
        print(f"accuracy {accuracy:.4f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
