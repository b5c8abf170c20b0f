"""An embedding with sparse gradients and SparseAdam, beside a dense layer with its own Adam."""

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 8, sparse=True)
        self.head = nn.Linear(8, 1)
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(words).mean(dim=1)))


def main(epochs: int) -> None:
    session = elastic.init()
    bag = Bag()
    model = session.distribute(bag)
    sparse = torch.optim.SparseAdam(list(bag.embedding.parameters()), lr=0.01)
    dense = torch.optim.Adam(bag.head.parameters(), lr=0.01)
    session.track(model=model, sparse=sparse, dense=dense)
    data = elastic.DataLoader(tasks.sentences(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for words, targets in step.batches():
                step.backward(F.mse_loss(model(words), targets))
            sparse.step()
            dense.step()
            sparse.zero_grad()
            dense.zero_grad()
