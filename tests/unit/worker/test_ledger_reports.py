"""What a member reports for the ledger, and when it sends everything not stored again."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import elastic
from elastic.v1 import local_pb2 as pb
from elastic.worker.control import LocalControl
from elastic.worker.data_loader import DataLoader
from elastic.worker.reporter import Reporter
from elastic.worker.session import Session
from elastic.worker.state.backlog import Backlog, LedgerBacklog, LedgerRecord
from elastic.worker.steps_clock import StepsClock
from elastic.worker.training import Training


class Place:
    """A member of rank 0 that records the messages it sends."""

    def __init__(self) -> None:
        self.sent: list[pb.LedgerEntries] = []
        generation = SimpleNamespace(number=1)
        membership = SimpleNamespace(group=SimpleNamespace(rank=0, generation=generation))
        link = SimpleNamespace(worker="w", send=self._send)
        self.ledger = LedgerBacklog()
        self.reporter = Reporter(cast(Any, link), cast(Any, membership))
        position = SimpleNamespace(epoch=0)
        state = SimpleNamespace(
            ledger=self.ledger, curve=Backlog(), committed=0, position=position, learning_rates=dict
        )
        self.reporter.publish(cast(Any, state), StepsClock(), lambda: None)

    def commit(self, *steps: int) -> None:
        for s in steps:
            self.ledger.append(
                LedgerRecord(step=s, epoch=0, generation=1, world_size=1, start=s, stop=s + 1)
            )

    def reported(self) -> list[tuple[bool, list[int]]]:
        """Return (everything not stored?, steps) of each report since the last call."""
        self.reporter.flush()
        said, self.sent = self.sent, []
        return [(report.whole, [e.step for e in report.entries]) for report in said]

    def _send(self, **kind: Any) -> None:
        if "ledger" in kind:
            self.sent.append(kind["ledger"])


def test_the_first_report_is_whole_and_later_ones_have_only_new_entries() -> None:
    place = Place()
    place.commit(0, 1)
    assert place.reported() == [(True, [0, 1])]
    place.commit(2)
    assert place.reported() == [(False, [2])]
    assert place.reported() == []


def test_all_entries_that_are_not_stored_are_sent_again_on_request() -> None:
    place = Place()
    place.commit(0, 1, 2)
    place.reported()
    place.reporter.ledger_stored(committed=1, run="", generation=1)
    place.commit(3)
    place.reporter.report_again()
    assert place.reported() == [(True, [1, 2, 3])]
    place.reporter.ledger_stored(committed=4, run="", generation=1)
    place.reporter.report_again()
    assert place.reported() == [(True, [])]  # this says that nothing is missing
    place.commit(4)
    assert place.reported() == [(False, [4])]


def test_at_most_20_000_entries_are_sent_before_some_are_stored() -> None:
    """A ledger disk that is full for hours must not fill the coordinator's memory."""
    place = Place()
    place.commit(*range(30_000))
    assert [len(steps) for _, steps in place.reported()] == [10_000, 10_000]
    place.commit(*range(30_000, 30_010))
    assert place.reported() == []
    place.reporter.ledger_stored(committed=15_000, run="", generation=1)
    assert [(w, s[0], s[-1]) for w, s in place.reported()] == [
        (False, 20_000, 29_999),
        (False, 30_000, 30_009),
    ]


def test_report_again_sends_the_oldest_entries_that_are_not_stored() -> None:
    place = Place()
    place.commit(*range(25_000))
    place.reported()
    place.reporter.report_again()
    assert [(w, s[0], len(s)) for w, s in place.reported()] == [
        (True, 0, 10_000),
        (False, 10_000, 10_000),
    ]


def test_a_worker_sends_the_rest_of_a_long_ledger_before_it_ends() -> None:
    place = Place()
    place.commit(*range(30_000))
    stored: list[int] = []

    def store(**kind: Any) -> None:
        if "ledger" in kind and kind["ledger"].entries:
            stored.extend(e.step for e in kind["ledger"].entries)
            place.reporter.ledger_stored(committed=stored[-1] + 1, run="", generation=1)

    cast(Any, place.reporter)._link.send = store
    place.reporter.flush()
    place.reporter.wait_for_ledger()
    place.reporter.flush()
    assert stored == list(range(30_000))


# ---- calls from a committed step to the queue, and from the queue to the agent

MOST_CALLS = 3


def calls_since(caller: str) -> list[str]:
    """Return elastic's functions on the stack, from the one that `caller` has called down."""
    package = Path(elastic.__file__).parent
    own = [f.function for f in inspect.stack()[2:] if package in Path(f.filename).parents]
    return [*reversed(own[: own.index(caller)])]


def test_a_committed_step_reaches_the_ledgers_queue_in_few_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record names the loader: each has epochs of its own."""
    calls: list[list[str]] = []
    loaders = []

    def append(queue: LedgerBacklog, record: LedgerRecord) -> None:
        del queue
        loaders.append(record.loader)
        calls.append([*calls_since("_end"), "append"])

    monkeypatch.setattr(LocalControl, "keeps_ledger", True)
    session = Session(Training(LocalControl()))
    model = session.distribute(torch.nn.Linear(1, 1))
    session.track(model=model)
    dataset = TensorDataset(torch.zeros(2, 1))
    monkeypatch.setattr(Backlog, "append", append)
    for data in (DataLoader(dataset, batch_size=2), DataLoader(dataset, batch_size=2)):
        for step in session.steps(data, epochs=1):
            with step:
                for (inputs,) in step.batches():
                    step.backward(model(inputs).sum())
    dist.destroy_process_group()
    assert calls == [["commit", "append"]] * 2
    assert loaders == [0, 1]
    assert len(calls[0]) <= MOST_CALLS


def test_queued_entries_are_sent_to_the_agent_in_few_calls() -> None:
    place, calls = Place(), list[list[str]]()

    def send(**kind: Any) -> None:
        if "ledger" in kind:
            calls.append([*calls_since("_beat"), "send"])
            raise SystemExit

    place.commit(0)
    cast(Any, place.reporter)._link.send = send
    with pytest.raises(SystemExit):
        place.reporter._beat()
    assert calls == [["flush", "_send_ledger", "send"]]
    assert len(calls[0]) <= MOST_CALLS
