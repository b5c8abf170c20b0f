"""One step: the scope whose end commits it."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from elastic.core.data_order import SampleRange, loss_weight
from elastic.errors import StepMisused, StepOverdue
from elastic.worker.data_loader import Deal, Dealer, to_device

if TYPE_CHECKING:
    from elastic.worker.session import Session


class Step:
    """A step of the job, as `session.steps` hands it out.

    `with step:` is the commit scope: leaving the block commits the step. If the group is lost
    inside, the block ends quietly, `committed` says whether the step counts all the same, and if
    not the loop hands out the same samples again.
    """

    def __init__(self, session: Session, dealer: Dealer, deal: Deal) -> None:
        self._session = session
        self._fetched = 0
        self._reduced = False
        self._entered = False
        self.committed = False
        """Whether the step counts; known when the block has ended."""
        self.take(dealer, deal)

    def take(self, dealer: Dealer, deal: Deal) -> None:
        """For the session: the samples, also when a change of group has dealt them anew."""
        self.dealer = dealer
        self._samples, self._micro_batches = deal.samples, deal.micro_batches
        self.index = self._session.committed
        """Committed steps before this one, over the whole job."""
        self.epoch = deal.samples.epoch

    @property
    def samples(self) -> SampleRange:
        """The positions of the epoch's order that the whole group consumes in this step."""
        return self._samples

    @property
    def share(self) -> int:
        """How many of this rank's samples count."""
        return sum(len(m) for m in self._micro_batches if m.weighted)

    def batches(self) -> Iterator[Any]:
        """This rank's micro-batches, collated and on the session's device.

        Only the last one's backward all-reduces. A rank that has no sample left gets a stand-in
        batch of weight zero, because its peers need it in their collectives.
        """
        if not self._entered:
            raise StepMisused("step.batches() was called outside of `with step:`")
        self._session.require_dealt(self)
        last = len(self._micro_batches) - 1
        for number in range(self._fetched, len(self._micro_batches)):
            self._session.reduce_gradients(number == last)
            self._fetched += 1
            yield to_device(self.dealer.fetch(), self._session.device)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """`loss.backward(**options)`, weighted by this rank's share of the global batch.

        loss: the mean over the samples of the micro-batch that `batches` yielded last. The
        averaged gradient is then the exact mean over the global batch, at uneven shares too.
        """
        if self._fetched == 0:
            raise StepMisused(
                "step.backward() was called before a batch was taken from step.batches()"
            )
        micro_batch = self._micro_batches[self._fetched - 1]
        weight = loss_weight(micro_batch, self._samples, world_size=self._session.world_size)
        (loss if weight == 1.0 else loss * weight).backward(**options)  # type: ignore[no-untyped-call]
        if self._fetched == len(self._micro_batches):
            self._session.wait_for_reduction()
            self._reduced = True

    def report(self, **values: Any) -> None:
        """Figures (loss=..., accuracy=...) for the live line, the status and the metrics.

        Tensors are read later, in the background, and only the newest of each name.
        """
        self._session.report(values)

    def __enter__(self) -> Step:
        self._entered = True
        self._session.begin_step(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            self._require_reduced()
            self._session.commit(self)
            self.committed = True
            return False
        if isinstance(error, StepOverdue):
            self.committed = True  # by the members that this one was behind
            return True
        if not isinstance(error, Exception) or not self._session.is_group_loss(error):
            return False
        self.committed = self._session.recover(self, error, reduced=self._reduced)
        return True

    @property
    def was_entered(self) -> bool:
        """The script has used `with step:`."""
        return self._entered

    def _require_reduced(self) -> None:
        if not self._reduced:
            raise StepMisused(
                f"step {self.index} ended without an averaged gradient: take every micro-batch "
                "from step.batches() and pass each loss to step.backward(loss)"
            )
