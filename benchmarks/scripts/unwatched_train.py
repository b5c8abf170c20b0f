"""Trains as `elastic_train.py` does, in workers that take no times, for comparison."""

from typing import Any

from benchmarks.scripts import elastic_train
from elastic.worker.steps_clock import Arrival, Pace, TimeSpent

_WATCHES: dict[type[Any], tuple[str, ...]] = {
    Arrival: ("watch",),  # if no parameter is watched, none has a hook
    Pace: ("reduced", "put_down"),
    TimeSpent: ("entered", "fetched", "called", "saved", "commit", "settle", "left"),
}


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces each method that takes a time."""


def main() -> None:
    for watch, methods in _WATCHES.items():
        for method in methods:
            getattr(watch, method)  # raises AttributeError if it was renamed
            setattr(watch, method, _nothing)
    elastic_train.main()


if __name__ == "__main__":
    main()
