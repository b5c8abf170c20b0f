"""Runs sessions in several processes, whose groups the test announces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step: once, not in every fork
from torch.utils.data import TensorDataset

from elastic.core.worker.machine import Worker
from elastic.worker.control import LocalControl
from elastic.worker.data_loader import DataLoader
from elastic.worker.group.membership import Membership
from elastic.worker.group.process_group import Group
from elastic.worker.reporter import Reports
from elastic.worker.session import Session
from elastic.worker.state.checkpointing import Checkpointing
from elastic.worker.state.job_state import JobState
from elastic.worker.steps_clock import StepsClock
from elastic.worker.training import Training
from tests.unit.worker.together import GLOO, JOIN_TIMEOUT_S, Seat, Test, run_by_each, run_together


class Heard(Reports):
    """Keeps what a session reports, for the test."""

    def __init__(self) -> None:
        self.state = JobState()
        self.answer: Callable[[], None] = lambda: None
        self.notices: list[tuple[str, Mapping[str, str]]] = []

    def publish(self, state: JobState, clock: StepsClock, answer: Callable[[], None]) -> None:
        del clock
        self.state, self.answer = state, answer

    def notice(self, name: str, fields: Mapping[str, str]) -> None:
        self.notices.append((name, fields))


class PeerControl(LocalControl):
    """A control that behaves as if there were an agent: another group follows a lost one."""

    keeps_ledger = True
    recovers = True

    def __init__(self, seat: Seat, backend: Any = GLOO) -> None:
        super().__init__()
        self.seat = seat
        self.backend = backend
        self.reports: Heard = Heard()
        self.membership = Membership(
            Worker(f"w{seat.rank}", pid=seat.rank + 1),
            report=lambda _status: None,
            committed=lambda: self.reports.state.committed,
            join_timeout_s=JOIN_TIMEOUT_S,
        )
        self.membership.attach()
        self.membership.assign(0)
        self._prepared = False

    def join(self) -> Group:
        if not self._prepared:
            self._prepared = True
            self.membership.prepare(self.seat.host.endpoint, self.backend)
        return self.membership.join(self.seat.host, self.backend)


class Peer:
    """One process's session, with a model of one weight per feature."""

    def __init__(
        self, seat: Seat, *, features: int = 1, checkpoints: Checkpointing | None = None
    ) -> None:
        self.seat = seat
        self.control = PeerControl(seat)
        self.control.checkpoints = checkpoints or self.control.checkpoints
        self.session = Session(Training(self.control))
        net = torch.nn.Linear(features, 1, bias=False).double()
        torch.nn.init.zeros_(net.weight)
        self.model = self.session.distribute(net)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        self.session.track(model=self.model, optimizer=self.optimizer)

    def announce(self, number: int, *ranks: int) -> None:
        """Announce a generation of these ranks, by default of all."""
        whole = self.seat.generation(number)
        members = tuple(whole.members[rank] for rank in ranks) or whole.members
        self.control.membership.announce(self.seat.generation(number, members=members))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weight(self) -> list[float]:
        found: list[float] = self.model.module.weight.flatten().tolist()  # type: ignore[union-attr,operator]
        return found


def train_together(*parts: Callable[[Peer], None]) -> None:
    """Run each part in a process of its own; all of them form the first group."""

    def seated(part: Callable[[Peer], None]) -> Callable[[Seat], None]:
        def go(seat: Seat) -> None:
            peer = Peer(seat)
            peer.announce(1)
            part(peer)

        return go

    run_together(*map(seated, parts))


def numbers(length: int, **options: Any) -> DataLoader:
    """Return a loader whose sample i is i."""
    dataset = TensorDataset(torch.arange(float(length), dtype=torch.float64).unsqueeze(1))
    return DataLoader(dataset, **{"shuffle": False, **options})


def in_sessions(count: int) -> Callable[[Test], Test]:
    """Run the test in each of `count` processes; its first argument is the process's peer."""
    return run_by_each(count, train_together)
