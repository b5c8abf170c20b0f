"""Refuses a step that a rank would commit without having taken part in its all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from elastic.core.reductions import MOST_MODELS
from elastic.core.worker.participation import Participation
from elastic.errors import StepMisused
from elastic.worker.compilation import untraced
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.group.process_group import Group

_HOW_TO_SKIP = (
    "A batch without usable samples needs a loss from the model's outputs, too, as in "
    "`loss = (outputs * 0).sum()`"
)


class Reductions:
    """Counts the collectives that begin inside the backward passes of last micro-batches.

    models: all distributed models of the script. A rank whose backward pass begins none has left
    out the all-reduce: each later one would meet the one before on the other ranks, and no member
    would have an error.
    """

    def __init__(self, models: Sequence[DistributedModel], part: Participation) -> None:
        self._models = models
        self._part = part
        self._count: Callable[[], int] | None = None
        """Returns the collectives that the group has begun. None: nothing counts them."""
        self._at_first = self._before = self._ended = 0
        self.newest: int | None = None
        """The collectives that the group had begun when the last pass ended."""
        self._is_under_way = False
        self._samples: list[tuple[torch.nn.Parameter | None, torch.Tensor | None, int]] = []
        """Of several models: a trained parameter of each, with its gradient before the pass."""

    def follow(self, group: Group) -> None:
        """The models are wrapped in this group. Members have sent each other different numbers of
        messages before, which count as collectives."""
        self._count, self.newest = group.collectives_counter(), None
        self._at_first = self._count() if self._count is not None else 0

    def leave(self) -> None:
        """The models are unwrapped. Drops the reference to the group."""
        self._count = None

    def collectives(self) -> int:
        """How many collectives the group has begun since `follow`."""
        count = self._count
        return count() - self._at_first if count is not None else 0

    def begin_block(self, newest: int | None) -> None:
        """A step's block begins. newest: the collectives that the group has begun, if known."""
        count = self._count
        if count is not None:
            try:
                self._ended = newest if newest is not None else count()
            except RuntimeError:  # the group was aborted, which the first pass will find
                self._ended = 0

    def end_block(self) -> None:
        """The block has ended without an error."""
        for model in self._models:
            if model.passes.calls and self._count is not None:
                self._note_outside(self._count())
                break

    @untraced
    def apart(self, function: Callable[[], Any]) -> Any:
        """Call `function`, whose collectives are not the script's."""
        count = self._count
        if count is None:
            return function()
        before = count()
        result = function()
        self._ended += count() - before
        return result

    def _note_outside(self, until: int) -> None:
        """A model was called once more than its passes explain: note the collectives since the last
        pass, up to `until`, in which loss.backward() may have averaged gradients. (Without such a
        call they may be messages between two members.)"""
        if until > self._ended:
            self._part.made += ((0, self._ended - until),)

    def begin_pass(self) -> None:
        """A backward pass that averages begins."""
        count = self._count
        self._before = count() if count is not None else 0
        self._is_under_way = True
        if len(self._models) > 1:
            self._samples = [
                (p := model.passes.sample, g := p.grad if p is not None else None, _version(g))
                for model in self._models
            ]

    def under_way(self) -> int:
        """The reductions that the pass under way has begun so far; 0 outside of such a pass."""
        count = self._count
        return count() - self._before if count is not None and self._is_under_way else 0

    def end_pass(self) -> int:
        """The backward pass has ended, perhaps by an error. Returns the reductions it has begun. If
        torch does not count them, each pass counts as one."""
        count, part = self._count, self._part
        self._is_under_way = False
        try:
            if count is None:
                begun = 1
            else:
                self.newest = newest = count()
                begun = newest - self._before
        except RuntimeError:  # the group was aborted, and the pass raises that
            begun = 0
        models = self._models_reached() if self._samples else 0
        more, frozen, reached = False, 0, models or 1
        for number, model in enumerate(self._models):
            passes, explained = model.passes, reached >> number & 1
            if passes.calls > explained:
                more = True
            passes.calls = 0
            if passes.frozen and explained:
                frozen += passes.frozen << 32 * number
        if more and count is not None:
            self._note_outside(self._before)
        self._ended = self._before + begun
        part.made += ((begun, models | frozen << MOST_MODELS),)
        part.begun += begun
        return begun

    def _models_reached(self) -> int:
        """Which of several models have other gradients now than before the pass, a bit for each.
        Where models have equal numbers of reductions, one could stand in for another. DDP writes
        the gradients of the same parameters on every rank, so one of each model will do."""
        samples, self._samples = self._samples, []
        found = 0
        for number, (parameter, gradient, version) in enumerate(samples):
            now = parameter.grad if parameter is not None else None
            if now is not gradient or _version(now) != version:
                found |= 1 << number
        return found

    def models_of_last_pass(self) -> list[int]:
        """The numbers of the models whose gradients the last pass has averaged."""
        if len(self._models) == 1:
            return [0]
        reached = self._part.made[-1][1]
        return [number for number in range(len(self._models)) if reached >> number & 1]

    def are_usual(self) -> bool:
        """Whether the passes of the block so far have begun what the steps before let expect, so
        that DDP has averaged all that it should."""
        made, expected = self._part.made, self._part.rhythm.expected
        return made == expected or (expected is not None and made == expected[: len(made)])

    def require_averaged(self, begun: int, loss: torch.Tensor) -> None:
        """Raise StepMisused if gradients from the pass of `loss`, which has begun so many
        reductions, were not averaged, or not all of them."""
        for model in self._models:
            passes = model.passes
            if passes.wrapper is not None and passes.forwarded:
                try:
                    passes.wrapper.reducer._check_reducer_finalized()
                except RuntimeError as error:  # DDP waits for gradients that do not come
                    raise StepMisused(_lacking(model)) from error
        models = self._models
        averaged: set[int] = set()
        if begun:  # by some; those that were not called have begun none
            models = [m for m in models if m.passes.wrapper is not None and not m.passes.forwarded]
            called = [m for m in self._models if m.passes.forwarded]
            averaged = {id(p) for m in called for p in m.passes.parameters}
        reached = _leaves_of(loss) - averaged if models else averaged
        for model in models:
            if any(id(p) in reached for p in model.passes.parameters):
                raise StepMisused(
                    f"gradients of {_name(model)} were computed in a step without being averaged: "
                    f"{_slip(model)}"
                )

    def refuse_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to step although the passes of this block have averaged nothing:
        raise StepMisused if it has parameters of a model."""
        self._refuse({id(p) for group in optimizer.param_groups for p in group["params"]})

    def refuse_commit(self) -> None:
        """The block ends and has averaged nothing: raise StepMisused if a model is trained."""
        self._refuse(None)

    def _refuse(self, parameters: Collection[int] | None) -> None:
        for model in self._models:
            if any(
                p.requires_grad and (parameters is None or id(p) in parameters)
                for p in model.passes.parameters
            ):
                raise StepMisused(
                    f"a step has averaged no gradients of {_name(model)}: its losses do not depend "
                    "on the parameters of a distributed model, as with outputs that were computed "
                    "before (cached features), in torch.no_grad() or detached, or with another "
                    "model. Call the model that session.distribute() has returned, inside of "
                    "`with step:`, and freeze what is not trained with requires_grad_(False). "
                    f"{_HOW_TO_SKIP}"
                )


def _lacking(model: DistributedModel) -> str:
    named = model.module.named_parameters()
    without = [name for name, p in named if p.requires_grad and p.grad is None]
    some = f" ({', '.join(without[:3])})" if without else ""
    return (
        f"gradients of {_name(model)} were not all averaged in a step, because its loss does not "
        f"depend on some of its parameters{some}. On every rank, each loss must depend on all "
        "parameters that are trained; if that differs between batches, pass "
        "find_unused_parameters=True to session.distribute()"
    )


def _slip(model: DistributedModel) -> str:
    if model.passes.forwarded:
        return (
            "two backward passes follow one forward pass, and only the first is averaged; add "
            "the losses and call step.backward() once, or call the model again before the "
            "second one"
        )
    return (
        "the script calls the module itself, or the model outside of `with step:`, or its loss is "
        "made of the parameters alone; call the model that session.distribute() has returned, "
        f"inside of the block. {_HOW_TO_SKIP}"
    )


def _version(gradient: torch.Tensor | None) -> int:
    """How often it was changed in place."""
    return gradient._version if gradient is not None else 0


def _name(model: DistributedModel) -> str:
    return type(model.module).__name__


def _leaves_of(loss: torch.Tensor) -> set[int]:
    """The ids of all leaves that get a gradient from `loss`, by its graph, which outlives its
    backward pass."""
    if loss.grad_fn is None:
        return {id(loss)}
    found: set[int] = set()
    seen, ahead = {loss.grad_fn}, [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found.add(id(leaf))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)
    return found
