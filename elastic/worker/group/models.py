"""The distributed models of a script, which begin, pass and end a step together."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch

from elastic.errors import StepMisused
from elastic.worker.group.distributed_model import DistributedModel

_LOST_GRADIENTS = (
    "gradients were zeroed, or set to None, inside of `for ... in step.batches():`. In this or "
    "another group that loop has several turns, and the gradients of all of them add up to the "
    "step's: call optimizer.zero_grad() above that loop, or below optimizer.step(), not inside of "
    "it"
)


class Models(list[DistributedModel]):
    """All of them, by the number of their call of `session.distribute`."""

    def begin_block(self) -> None:
        for model in self:
            model.begin_block()
            model.passes.together = True

    def end_block(self) -> None:
        for model in self:
            model.passes.accumulated.clear()
            model.passes.together = False

    def call_together(self, together: bool) -> None:
        """The script is, or is no longer, inside of a call that all members make together."""
        for model in self:
            model.passes.together = together

    @contextlib.contextmanager
    def apart_in_eval(self) -> Iterator[None]:
        """Call the models in evaluation mode and without DDP, since members call them different
        numbers of times."""
        trained = [module for model in self for module in model.modules() if module.training]
        for module in trained:
            module.training = False
        for model in self:
            model.passes.apart = True
        try:
            yield
        finally:
            for model in self:
                model.passes.apart = False
            for module in trained:
                module.training = True

    def reduce_gradients(self, reduce: bool) -> None:
        for model in self:
            model.reduce_gradients(reduce)

    def broadcast_first(self) -> None:
        """Do at once what DDP does in the first forward passes of a step by collectives, so that
        those of the micro-batches need none, other than the last one's."""
        for model in self:
            model.broadcast_first()

    def broadcast_buffers(self) -> None:
        for model in self:
            model.broadcast_buffers()

    def have_gradients(self) -> list[bool]:
        """Of each model, whether it has gradients other than zero."""
        return [model.has_gradients() for model in self]

    def multiply_gradients(
        self, factor: torch.Tensor, averaged: Collection[int], left_over: Sequence[bool]
    ) -> None:
        """Multiply the gradients of the models with the numbers `averaged`. left_over: of each
        model, whether it had gradients before the pass. Raises StepMisused if one of these had."""
        for number in averaged:
            if left_over[number]:
                raise StepMisused(
                    "step.backward() was given a weight while gradients of an earlier step or pass "
                    "were left, whose scale is another; call optimizer.zero_grad() before it"
                )
            self[number].multiply_gradients(factor)

    def drop_gradients(self) -> None:
        """Have optimizers leave all parameters as they are: they pass over those without a gradient
        (their momentum and weight decay, too)."""
        for model in self:
            for parameter in model.passes.parameters:
                parameter.grad = None

    def keep_accumulated(self, *, ends_only: bool = False) -> None:
        """Remember gradients that the next micro-batch must find: what a micro-batch other than the
        last one has added, or what was there before the first one."""
        for model in self:
            model.keep_accumulated(ends_only=ends_only)

    def require_accumulated(self) -> None:
        """Raise StepMisused if gradients of the micro-batches before are gone."""
        for model in self:
            if model.has_lost_accumulated():
                raise StepMisused(_LOST_GRADIENTS)
