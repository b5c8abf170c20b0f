"""Names the parts of torch that cannot work in a job whose group changes, and says why."""

from __future__ import annotations

import traceback

from elastic.errors import ConfigurationError

_REASONS = {
    "ZeroRedundancyOptimizer": (
        "ZeroRedundancyOptimizer keeps each part of its state on one rank of one group only, so "
        "the part of a lost worker would be lost; use the plain optimizer, whose state every "
        "worker holds"
    ),
    "PostLocalSGDOptimizer": (
        "PostLocalSGDOptimizer lets the weights of the ranks differ between averages, so a worker "
        "that joins or recovers could not take them over; use the plain optimizer, and "
        "elastic.DataLoader(..., accumulate=N) to communicate less often"
    ),
    "Join": (
        "Join shadows the collectives of ranks that have run out of data, in one group; remove it: "
        "elastic.DataLoader gives every rank a batch in each step"
    ),
}
_FILES = {
    "/torch/distributed/optim/zero_redundancy_optimizer.py": "ZeroRedundancyOptimizer",
    "/torch/distributed/optim/post_localSGD_optimizer.py": "PostLocalSGDOptimizer",
    "/torch/distributed/algorithms/model_averaging/": "PostLocalSGDOptimizer",
    "/torch/distributed/algorithms/join.py": "Join",
}


def require_fit(thing: object) -> None:
    """Raise ConfigurationError if `thing` is of such a type."""
    for kind in type(thing).__mro__:
        if kind.__module__.startswith("torch.") and kind.__name__ in _REASONS:
            raise unfit(kind.__name__)


def unfit(name: str) -> ConfigurationError:
    return ConfigurationError(f"{name} cannot be used: {_REASONS[name]}")


def reason_behind(error: BaseException) -> str | None:
    """Why the part of torch that raised `error` cannot be used; None if it is no such part."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for place, name in _FILES.items():
            if place in frame.filename:
                return _REASONS[name]
    return None
