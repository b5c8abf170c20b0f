"""Small problems for the styles.

In float64 another world size changes only rounding, and with small whole numbers nothing.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import elastic

SAMPLES = 61  # of `regression`: an epoch ends with shares of 2, 2, 1
WHOLE = 64  # of `whole_numbers`: every batch of 8 is full, so that means are exact


def regression(samples: int = SAMPLES, features: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(samples, features, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.sin(inputs).sum(dim=1, keepdim=True))


def held_out(device: torch.device, samples: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of an evaluation, on this device."""
    inputs, targets = regression(samples).tensors
    return inputs.to(device), targets.to(device)


def classes(samples: int = SAMPLES, features: int = 8, number: int = 4) -> TensorDataset:
    inputs, targets = regression(samples, features).tensors
    edges = torch.linspace(-2.0, 2.0, number - 1, dtype=torch.float64)
    return TensorDataset(inputs, torch.bucketize(targets.squeeze(1), edges))


def sentences(samples: int = SAMPLES, length: int = 6, words: int = 40) -> TensorDataset:
    """Sentences as numbers of words, with one target each."""
    generator = torch.Generator().manual_seed(12)
    texts = torch.randint(words, (samples, length), generator=generator)
    return TensorDataset(texts, texts.double().mean(dim=1, keepdim=True) / words)


def whole_numbers(samples: int = WHOLE, features: int = 8) -> TensorDataset:
    """Inputs and targets of few bits (float32): with an L1 loss and rates that are powers of two
    all sums are exact, in 16 bits as well."""
    generator = torch.Generator().manual_seed(13)
    inputs = torch.randint(-2, 3, (samples, features), generator=generator).float()
    targets = torch.randint(-4, 5, (samples, 1), generator=generator).float()
    return TensorDataset(inputs, targets)


def net(features: int = 8, hidden: int = 16, outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    ).double()


def exact_net(features: int = 8) -> nn.Module:
    """A linear model for `whole_numbers`, with all weights zero."""
    model = nn.Linear(features, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def train(
    session: elastic.Session, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int
) -> None:
    """The usual loop, for styles that are about something else."""
    data = elastic.DataLoader(regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
