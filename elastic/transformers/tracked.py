"""What a worker that joins must know of a Trainer beside weights, optimizer and scaler."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

_OF_STATE = (
    *("global_step", "epoch", "total_flos", "num_input_tokens_seen"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
_OF_TRAINER = (
    *("current_flos", "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"),
    *("_initial_global_step", "_initial_num_input_tokens_seen"),
)
_OF_LIBRARIES = ("_metrics", "_total_train_tokens")  # what TRL's trainers sum up between two logs


class Progress:
    """The state that is the same on every worker: counters, sums of losses, the best metric, the
    scheduler, and callbacks whose state a checkpoint of Trainer's would hold, too."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.scheduler: Any = None
        self.began = 0
        """The committed steps of the job as the present train() began."""
        self.grad_norm: Any = None
        self.learning_rate: Any = None
        """Those of the last step, which a worker logs that got the step's result from others."""

    def begin(self, committed: int) -> None:
        """train() begins: give Trainer's sums the values with which its loop will begin."""
        trainer = self._trainer
        self.scheduler, self.began = trainer.lr_scheduler, committed
        self.grad_norm = self.learning_rate = None
        trainer.current_flos = trainer._total_loss_scalar = 0.0
        trainer._tr_loss = torch.tensor(0.0, device=trainer.args.device)
        trainer._globalstep_last_logged = trainer._initial_global_step = 0
        trainer._initial_num_input_tokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        """The state, for elastic."""
        trainer = self._trainer
        return {
            "began": self.began,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "state": {name: getattr(trainer.state, name) for name in _OF_STATE},
            "trainer": {name: getattr(trainer, name, None) for name in _OF_TRAINER},
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else {},
            "callbacks": [each.state() for each in self._callbacks()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        trainer = self._trainer
        self.began = state["began"]
        self.grad_norm, self.learning_rate = state["grad_norm"], state["learning_rate"]
        for name in _OF_STATE:
            setattr(trainer.state, name, state["state"][name])
        for name in _OF_TRAINER:
            value = state["trainer"][name]
            if isinstance(value, torch.Tensor):
                value = value.detach().clone().to(trainer.args.device)
            setattr(trainer, name, value)
        if self.scheduler is not None and state["scheduler"]:
            self.scheduler.load_state_dict(state["scheduler"])
        for callback, its in zip(self._callbacks(), state["callbacks"], strict=False):
            vars(callback).update(vars(type(callback).from_state(its)))

    def _callbacks(self) -> list[Any]:
        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]


class History:
    """The log history, and what a library has summed up for its next log. Durations in it differ
    between workers; a worker that joins takes over those of rank 0.

    The history is text, because an object for each entry would be copied in every step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._of: list[Any] = []
        self._entries = 0
        self._text = ""

    def state_dict(self) -> dict[str, Any]:
        """The state, for elastic."""
        history = self._trainer.state.log_history
        if self._of is not history or len(history) < self._entries:
            self._of, self._entries, self._text = history, 0, ""
        for entry in history[self._entries :]:
            self._text += json.dumps(entry, default=_plain) + "\n"
        self._entries = len(history)
        present = {n: vars(self._trainer)[n] for n in _OF_LIBRARIES if n in vars(self._trainer)}
        return {"log_history": self._text, "libraries": present}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        trainer = self._trainer
        self._text = state["log_history"]
        self._of = trainer.state.log_history
        trainer.state.log_history[:] = [json.loads(line) for line in self._text.splitlines()]
        self._entries = len(trainer.state.log_history)
        for name, value in state["libraries"].items():
            setattr(trainer, name, value)


def _plain(value: Any) -> Any:
    """A number or a text in place of what JSON does not know."""
    return value.item() if callable(getattr(value, "item", None)) else str(value)
