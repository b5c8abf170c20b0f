"""Refuses scripts that would not train as one job, with what to write instead."""

from __future__ import annotations

from typing import NoReturn

import torch

from elastic.core.worker.participation import Participation
from elastic.errors import ConfigurationError, StepMisused
from elastic.worker.group.models import Models
from elastic.worker.state.job_state import JobState


def require_trained_together(models: Models, state: JobState) -> None:
    """Raise ConfigurationError, as the first loop begins, if members would not train one model."""
    covered = {id(p) for module in state.modules().values() for p in module.parameters()}
    if not models:
        raise ConfigurationError(
            "no model was given to session.distribute(), so every worker would train its "
            "own; write `model = session.distribute(Net())`"
        )
    for model in models:
        if any(id(p) not in covered for p in model.parameters()):
            raise ConfigurationError(
                f"a model given to session.distribute() ({type(model.module).__name__}) is not "
                "tracked, so a joining worker would begin with other weights; call "
                "session.track(model=model, optimizer=optimizer)"
            )


def require_left_well(part: Participation) -> None:
    """Raise StepMisused if the script left its loop with a step that does not count."""
    if part.owes_step:
        raise StepMisused(
            f"the loop over session.steps() was left after a block of step "
            f"{part.progress.committed} that does not count: the group was lost in it, or "
            "an exception has left it, so the step would be missing; leave the loop only after "
            "steps that count, as in `if session.committed >= 1000: break` or "
            "`if step.committed and ...: break`"
        )


def require_complete(part: Participation) -> None:
    """The script has ended: raise ConfigurationError if it has not trained, or has too few loops
    for the state; StepMisused as `require_left_well` does."""
    require_left_well(part)
    if part.loop < 0:
        raise ConfigurationError(
            "the script ended without training: it never iterated over session.steps(); "
            "write `for step in session.steps(data, epochs=...):`"
        )
    if part.holds_back:
        raise ConfigurationError(
            f"the job's state belongs to loop {part.progress.loop + 1} over "
            f"session.steps(), but the script has only {part.loop + 1}; use the script "
            "that saved the checkpoint, or another checkpoint directory"
        )


# ---- where an optimizer steps


def refuse_step_in_backward(optimizer: torch.optim.Optimizer) -> NoReturn:
    """Raise StepMisused: a hook steps while gradients are computed."""
    raise StepMisused(
        f"{type(optimizer).__name__}.step() was called during step.backward(), "
        "as by register_post_accumulate_grad_hook(): its gradients are not averaged yet; "
        "call it below step.backward()"
    )


def refuse_step_above_loop(optimizer: torch.optim.Optimizer) -> NoReturn:
    """Raise StepMisused: there is no group yet."""
    raise StepMisused(
        f"{type(optimizer).__name__}.step() was called before the first loop over "
        "session.steps(): this worker would train alone, as every other one does. elastic trains "
        "in `for step in session.steps(data, epochs=...):` with `with step:` around each step. The "
        "trainer of a framework has a loop of its own: give transformers' Trainer to "
        "elastic.transformers.attach(trainer, session), and Lightning's the argument "
        "strategy=elastic.lightning.ElasticStrategy(session); in place of another one write such a "
        "loop, or leave out elastic.init() and start the script with --launch torchrun, which "
        "restarts all workers when one is lost. What each worker fits for itself, "
        "as a learning rate finder does, belongs above elastic.init(), or into "
        "session.warm_up(function), which undoes changes to tracked objects"
    )


def refuse_step_between_batches(optimizer: torch.optim.Optimizer) -> NoReturn:
    """Raise StepMisused: further micro-batches may follow."""
    raise StepMisused(
        f"{type(optimizer).__name__}.step() was called inside of `for ... in step.batches():`. In "
        "this or another group that loop has several turns, and only the last one averages the "
        "gradients of all: call it below that loop"
    )
