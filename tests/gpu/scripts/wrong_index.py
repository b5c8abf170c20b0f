"""Trains an embedding on the session's device; a batch of the fifth step has a word too many."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic
from tests import shared_gpus

WORDS = 40


def main() -> None:
    assert len(sys.argv) == 2
    shared_gpus.use()
    session = elastic.init()
    net = nn.Sequential(nn.Embedding(WORDS, 8), nn.Flatten(), nn.Linear(16, 1))
    model = session.distribute(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.track(model=model, optimizer=optimizer)
    words = torch.randint(WORDS, (400, 2), generator=torch.Generator().manual_seed(0))
    data = elastic.DataLoader(TensorDataset(words), batch_size=4, seed=3)
    for step in session.steps(data, epochs=5):
        with step:
            for (batch,) in step.batches():
                if step.index == 5:
                    batch[0, 0] = WORDS
                step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
