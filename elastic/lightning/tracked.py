"""The state of a Trainer as the job tracks it: where its loops are, and what decides from there."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loops.progress import _BaseProgress
from torch.optim.lr_scheduler import LRScheduler

from elastic.lightning.metrics import StepMetrics
from elastic.lightning.results import GroupResults

_OF_CHECKPOINTS = (
    *("dirpath", "best_model_score", "best_model_path", "current_score", "best_k_models"),
    *("kth_best_model_path", "kth_value", "last_model_path", "_last_global_step_saved"),
    *("_last_checkpoint_saved", "_defer_save_until_validation"),
)
"""Attributes of a ModelCheckpoint. Its own state_dict() lacks some, and is refused by one with
another directory, which is what a worker that joins begins with."""


class TrainerState:
    """Of the present Trainer: the progress of its loops, values and metrics that were logged, the
    state of Lightning's callbacks, and the versions of its loggers. Equal on every worker."""

    def __init__(self, metrics: StepMetrics) -> None:
        self._metrics = weakref.ref(metrics)
        self._trainer: weakref.ref[Any] | None = None
        self._progress: list[_BaseProgress] = []
        self._timers: weakref.WeakKeyDictionary[Timer, float] = weakref.WeakKeyDictionary()
        self.was_loaded = False
        """A state has been taken over."""

    def follow(self, trainer: Any) -> None:
        """This Trainer trains from now on."""
        self._trainer = weakref.ref(trainer)
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        loops = (fit, epoch, epoch.automatic_optimization, epoch.val_loop)
        self._progress = [
            node
            for loop in loops
            for value in vars(loop).values()
            if isinstance(value, _BaseProgress)
            for node in _nodes(value)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain types."""
        trainer = self._present()
        epoch, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        return {
            "progress": [
                {k: v for k, v in vars(node).items() if isinstance(v, int)}
                for node in self._progress
            ],
            "stepped": epoch._batches_that_stepped,
            "evaluated": dict(epoch.val_loop._seen_batches_per_dataloader),
            "should_stop": trainer.should_stop,
            "first": connector._first_loop_iter,
            "fx": connector._current_fx,
            "callback_metrics": dict(connector._callback_metrics),
            "logged_metrics": dict(connector._logged_metrics),
            "results": _results(trainer).state_dict(),
            "callbacks": self._of_callbacks(trainer),
            "versions": [_version(logger) for logger in trainer.loggers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state over, in the objects that the loops hold."""
        self.was_loaded = True
        trainer = self._present()
        epoch, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
        for node, numbers in zip(self._progress, state["progress"], strict=True):
            vars(node).update(numbers)
        epoch._batches_that_stepped = state["stepped"]
        epoch.val_loop._seen_batches_per_dataloader.clear()
        epoch.val_loop._seen_batches_per_dataloader.update(state["evaluated"])
        trainer.should_stop = state["should_stop"]
        connector._first_loop_iter, connector._current_fx = state["first"], state["fx"]
        connector._callback_metrics = dict(state["callback_metrics"])
        connector._logged_metrics = dict(state["logged_metrics"])
        metrics = self._metrics()
        _results(trainer).load_state_dict(state["results"], metrics.by_name if metrics else {})
        for key, callback in _keyed(trainer, lightnings=True):
            self._load_callback(callback, state["callbacks"].get(key))
        for logger, version in zip(trainer.loggers, state["versions"], strict=False):
            if version is not None and hasattr(logger, "_version"):
                logger._version = version

    def settle(self) -> None:
        """A state was taken over where the loop asks for its next batch. It may be of another
        place, as where the job was told to stop, or of the end of an earlier fit: what lies between
        that place and the next batch is not repeated, so let the counters say that it is done."""
        self.was_loaded = False
        fit = self._present().fit_loop
        epoch = fit.epoch_loop
        batches, steps = epoch.batch_progress, epoch.automatic_optimization.optim_progress.optimizer
        for tracker in (batches.total, batches.current):
            tracker.started = tracker.processed = tracker.completed = tracker.ready
        for tracker in (steps.step.total, steps.step.current):
            tracker.completed = tracker.ready
        epoch._batches_that_stepped = steps.step.total.completed
        if batches.current.ready < fit.max_batches:
            return
        epochs = fit.epoch_progress
        for tracker in (epochs.total, epochs.current):
            tracker.started = tracker.processed = tracker.completed = tracker.ready
        epochs.increment_ready()
        epochs.increment_started()
        batches.reset_on_run()
        epoch.scheduler_progress.reset_on_run()
        epoch.automatic_optimization.optim_progress.reset_on_run()
        epoch._results.reset()

    # ---- inside

    def _present(self) -> Any:
        trainer = self._trainer() if self._trainer is not None else None
        assert trainer is not None, "a Trainer is followed before the group forms"
        return trainer

    def _of_callbacks(self, trainer: Any) -> dict[str, Any]:
        found = {}
        for key, callback in _keyed(trainer, lightnings=True):
            if isinstance(callback, ModelCheckpoint):
                state = {name: getattr(callback, name) for name in _OF_CHECKPOINTS}
                if state["dirpath"] is not None:
                    state["dirpath"] = os.fspath(state["dirpath"])
            elif isinstance(callback, Timer):
                state = {"began": self._timers.setdefault(callback, time.time())}
            else:
                state = callback.state_dict()
            if state:
                found[key] = state
        return found

    def _load_callback(self, callback: Callback, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        if isinstance(callback, ModelCheckpoint):
            vars(callback).update({**state, "best_k_models": dict(state["best_k_models"])})
        elif isinstance(callback, Timer):
            self._timers[callback] = state["began"]
            callback._offset = 0
            callback._offset = time.time() - state["began"] - callback.time_elapsed()
        else:
            callback.load_state_dict(state)


class CallbacksState:
    """The states of the script's own callbacks, which may differ between workers."""

    def __init__(self) -> None:
        self._trainer: weakref.ref[Any] | None = None

    def follow(self, trainer: Any) -> None:
        """This Trainer trains from now on."""
        self._trainer = weakref.ref(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each that has one."""
        trainer = self._trainer() if self._trainer is not None else None
        keyed = _keyed(trainer, lightnings=False) if trainer is not None else ()
        return {key: state for key, each in keyed if (state := each.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let each take its state over."""
        trainer = self._trainer() if self._trainer is not None else None
        for key, each in _keyed(trainer, lightnings=False) if trainer is not None else ():
            if key in state:
                each.load_state_dict(state[key])


class Schedulers:
    """The learning rate schedulers of the present fit, in order."""

    def __init__(self) -> None:
        self.present: list[LRScheduler] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each."""
        return {str(number): each.state_dict() for number, each in enumerate(self.present)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let each take its state over."""
        for number, each in enumerate(self.present):
            each.load_state_dict(state[str(number)])


def _nodes(progress: _BaseProgress) -> Iterator[_BaseProgress]:
    yield progress
    for value in vars(progress).values():
        if isinstance(value, _BaseProgress):
            yield from _nodes(value)


def _results(trainer: Any) -> GroupResults:
    results: Any = trainer.fit_loop.epoch_loop._results
    assert isinstance(results, GroupResults)
    return results


def _keyed(trainer: Any, *, lightnings: bool) -> Iterator[tuple[str, Callback]]:
    """The callbacks with a key for each. lightnings: those of Lightning's own, else the others."""
    for number, callback in enumerate(trainer.callbacks):
        is_known = isinstance(callback, (ModelCheckpoint, Timer))
        is_known |= type(callback).__module__.startswith("lightning.pytorch.callbacks")
        if is_known is lightnings:
            yield f"{number} {type(callback).__qualname__}", callback


def _version(logger: Any) -> int | str | None:
    version = getattr(logger, "version", None)
    return version if isinstance(version, (int, str)) else None
