"""Makes the model and the data that every side of a benchmark trains."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset

CLASSES = 10
_SEQUENCE = 8


@dataclass(frozen=True, kw_only=True)
class Size:
    """A multilayer perceptron, and its data; `batch_size` is per worker."""

    inputs: int
    hidden: tuple[int, ...]
    batch_size: int
    samples: int
    normalizes: bool = False
    """A BatchNorm follows each hidden layer."""
    attends: bool = False
    """The layers are a transformer's, over a sequence of eight that `inputs` are cut into."""


# Milliseconds of a step, for 3 workers on 2 cores, with gloo and one thread each.
SIZES = {
    "tiny": Size(inputs=64, hidden=(128, 128), batch_size=16, samples=20_000),  # 4 ms
    "2ms": Size(inputs=128, hidden=(256, 256), batch_size=32, samples=20_000),  # 2 ms for 2 workers
    "small": Size(inputs=256, hidden=(512, 512, 512), batch_size=64, samples=20_000),  # 15 ms
    "5m": Size(inputs=512, hidden=(1536, 1536, 1024), batch_size=32, samples=10_000),  # 50 ms
    # 75 ms for 2 workers
    "11m": Size(inputs=512, hidden=(2432, 2432, 1536), batch_size=32, samples=10_000),
    # A GB of parameters, gradients and momentum
    "0.3gb": Size(inputs=1024, hidden=(8192, 8192), batch_size=4, samples=20_000),
    # As many buffers as in a deep ResNet: 300, beside 402 parameters.
    "100bn": Size(inputs=128, hidden=(128,) * 100, batch_size=64, samples=20_000, normalizes=True),
    "290t": Size(inputs=512, hidden=(64,) * 24, batch_size=16, samples=20_000, attends=True),
    "1002t": Size(inputs=32, hidden=(32,) * 500, batch_size=32, samples=20_000),  # parameters
}


def build(size: Size, seed: int = 0) -> nn.Sequential:
    """Build the model, with the same weights in every process that gives the same seed."""
    torch.manual_seed(seed)
    if size.attends:
        return _transformer(size)
    widths = (size.inputs, *size.hidden)
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following)]
        layers += [nn.BatchNorm1d(following)] if size.normalizes else []
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))


def _transformer(size: Size) -> nn.Sequential:
    width = size.inputs // _SEQUENCE
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (_SEQUENCE, width)),
        nn.TransformerEncoder(layer, len(size.hidden), enable_nested_tensor=False),
        nn.Flatten(),
        nn.Linear(size.inputs, CLASSES),
    )


def frozen(megabytes: int, seed: int = 0) -> nn.Module:
    """Return a module with so much state, in tensors of 4 MB, that is not trained."""
    tensors = [torch.full((2**20,), float(seed)) for _ in range(megabytes // 4)]
    return nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in tensors)


class _OneByOne(TensorDataset):
    """A subclass, so `elastic.DataLoader` leaves it to torch's loader, as other datasets."""


def dataset(size: Size, *, one_by_one: bool = False) -> TensorDataset:
    """Return random samples, the same in every process.

    one_by_one: every side loads sample by sample; otherwise elastic takes a batch of rows at once.
    """
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size.samples, size.inputs, generator=generator)
    labels = torch.randint(CLASSES, (size.samples,), generator=generator)
    return _OneByOne(inputs, labels) if one_by_one else TensorDataset(inputs, labels)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
