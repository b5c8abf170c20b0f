"""Rotary embeddings, whose cache is a buffer that is not saved and grows with the sequences; and a
buffer of prototypes that is saved and grows, too."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(40, 8), nn.Linear(8, 1)
        self.register_buffer("prototypes", torch.zeros(1, 8))
        self._grow(2)

    def _grow(self, length: int) -> None:
        self.longest = length
        angles = torch.outer(torch.arange(length).double(), 0.1 ** torch.arange(8).double())
        self.register_buffer("turns", angles.cos(), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if words.size(1) > self.longest:
            self._grow(words.size(1))
        turned = self.embed(words) * self.turns[: words.size(1)]
        return self.out(torch.tanh(turned.mean(dim=1) + self.prototypes.mean(dim=0)))


def main(epochs: int) -> None:
    session = elastic.init()
    net = Rotary().double()
    model = session.distribute(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.sentences(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        length = min(2 + step.index // 5, 6)
        with step:
            for words, targets in step.batches():
                step.backward(F.mse_loss(model(words[:, :length]), targets))
            optimizer.step()
            optimizer.zero_grad()
            if step.index % 10 == 5:
                net.prototypes = torch.cat([net.prototypes, net.prototypes[-1:] + 0.1])
