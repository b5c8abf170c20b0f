"""A small language model whose output layer shares its weight with the embedding."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 12)
        self.body = nn.Linear(12, 12)
        self.head = nn.Linear(12, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(words)).mean(dim=1)))


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(Tied())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.sentences(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for words, _ in step.batches():
                step.backward(F.cross_entropy(model(words[:, :-1]), words[:, -1]))
            optimizer.step()
            optimizer.zero_grad()
