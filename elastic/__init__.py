"""Keeps one data-parallel PyTorch job training while machines come and go.

session = elastic.init()
model = session.distribute(Net())
session.track(model=model, optimizer=optimizer)
data = elastic.DataLoader(dataset, batch_size=64, seed=0)
for step in session.steps(data, epochs=10):
    with step:
        for inputs, labels in step.batches():
            step.backward(loss_of(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.version import __version__, other_package, unfit_system

if TYPE_CHECKING:
    from elastic.core.learning_rate import LinearScaling, NoScaling, SqrtScaling
    from elastic.worker.data_loader import DataLoader
    from elastic.worker.indexed import Indexed
    from elastic.worker.session import Session, init
    from elastic.worker.step import Step

__all__ = [
    "DataLoader",
    "Indexed",
    "LinearScaling",
    "NoScaling",
    "Session",
    "SqrtScaling",
    "Step",
    "__version__",
    "init",
]

# Imported at first use, because the agent and the command line must not import torch.
_HOMES = {
    "DataLoader": "elastic.worker.data_loader",
    "Indexed": "elastic.worker.indexed",
    "LinearScaling": "elastic.core.learning_rate",
    "NoScaling": "elastic.core.learning_rate",
    "Session": "elastic.worker.session",
    "SqrtScaling": "elastic.core.learning_rate",
    "Step": "elastic.worker.step",
    "init": "elastic.worker.session",
}


if (_why := other_package(Path(__file__).parent.parent)) is not None:
    raise ImportError(_why)


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}") from None
    if (why := unfit_system(sys.platform)) is not None:
        raise ImportError(why)
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """The public names, for Tab and help(), before any of them is imported."""
    return sorted(__all__)
