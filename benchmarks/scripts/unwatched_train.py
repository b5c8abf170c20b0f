"""The training of `elastic_train.py` in workers that take no times of it, for comparison."""

from typing import Any

from benchmarks.scripts import elastic_train
from elastic.worker.steps_clock import Arrival, Pace, TimeSpent

_WATCHES: dict[type[Any], tuple[str, ...]] = {
    Arrival: ("watch",),  # without a watched parameter there is no hook on any
    Pace: ("reduced", "put_down"),
    TimeSpent: ("entered", "fetched", "called", "saved", "commit", "settle", "left"),
}


def _nothing(*_: Any, **__: Any) -> None:
    """Instead of taking a time."""


def main() -> None:
    for watch, methods in _WATCHES.items():
        for method in methods:
            getattr(watch, method)  # raises if it has another name now
            setattr(watch, method, _nothing)
    elastic_train.main()


if __name__ == "__main__":
    main()
