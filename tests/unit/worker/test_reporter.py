"""What a worker reports of its training, and what it sends again to a new coordinator."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
import torch

from elastic.core.whereabouts import Place
from elastic.core.worker.participation import Progress
from elastic.v1 import job_pb2, stacks_pb2
from elastic.worker.compilation import Compilations
from elastic.worker.group.membership import Durations
from elastic.worker.group.process_group import Group
from elastic.worker.link import Link
from elastic.worker.reporter import Reporter, own_stacks
from elastic.worker.state.backlog import LedgerRecord
from elastic.worker.state.exchange import Outcome
from elastic.worker.state.job_state import JobState
from elastic.worker.steps_clock import StepsClock
from tests.unit.worker.state.job_states import At


class Wire:
    """A link that records what is sent."""

    worker = "w"
    notice = Link.notice

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def send(self, **kind: Any) -> None:
        self.sent += kind.items()

    def taken(self, kind: str) -> list[Any]:
        taken = [message for found, message in self.sent if found == kind]
        self.sent = [pair for pair in self.sent if pair[0] != kind]
        return taken


class Member:
    """A membership in the group that the test gives it."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.durations = Durations(join_s=0.5, sync_s=0.25)


class Script:
    """A script that trains, and its reporter, which sends when the test says so."""

    def __init__(self, group: Group | None = None) -> None:
        self.wire, self.member = Wire(), Member()
        self.member.group = group
        self.compilations = Compilations()
        self.reporter = Reporter(self.wire, self.member, self.compilations)  # type: ignore[arg-type]
        self.state, self.clock = JobState(), StepsClock(self.compilations)
        self.reporter.publish(self.state, self.clock, lambda: None)

    def commit(self, *steps: int) -> None:
        for step in steps:
            self.state.ledger.append(
                LedgerRecord(step=step, epoch=0, generation=1, world_size=1, start=step, stop=step)
            )
            self.state.job = At(Progress(committed=step + 1))

    def ledger(self) -> list[int]:
        """Send a report; return the steps of its ledger entries."""
        self.reporter.flush()
        return [e.step for entries in self.wire.taken("ledger") for e in entries.entries]


def test_a_probe_is_answered_at_once_without_the_scripts_figures(alone: Group) -> None:
    script = Script(alone)
    script.state.job = At(Progress(committed=7))
    script.reporter.report({"loss": torch.tensor(0.5)}, committed=False)
    script.clock.begin()
    script.reporter.answer_probe()
    (answer,) = script.wire.taken("progress")
    assert answer.probed
    assert (answer.worker, answer.generation, answer.committed) == ("w", 1, 7)
    assert answer.in_step_s > 0.0
    assert not answer.reported
    script.reporter.flush()
    (progress,) = script.wire.taken("progress")
    assert not progress.probed
    assert dict(progress.reported) == {"loss": 0.5}


def test_a_brief_request_for_stacks_is_answered_with_place_and_main_thread(alone: Group) -> None:
    script = Script(alone)
    script.state.job = At(Progress(committed=7))
    script.clock.place.now = Place.DATA, script.clock.place.now[1] - 5.0
    script.reporter.answer_stacks(stacks_pb2.StacksRequest(request=3, brief=True))
    (answer,) = script.wire.taken("stacks")
    assert (answer.worker, answer.request, answer.generation) == ("w", 3, 1)
    assert (answer.answer, answer.committed) == (stacks_pb2.ANSWER_GIVEN, 7)
    assert answer.place == stacks_pb2.PLACE_DATA
    assert answer.place_s >= 5.0
    (own,) = answer.processes
    (main,) = own.threads
    assert main.name == "MainThread"
    assert "own_stacks" in [frame.function for frame in main.frames]
    script.reporter.flush()
    (progress,) = script.wire.taken("progress")
    assert progress.place == stacks_pb2.PLACE_DATA


@pytest.mark.parametrize(("before", "told"), [(None, 0), (0, 2), (1, 1), (9, 0)])
def test_the_answer_counts_the_collectives_since_the_last_reduction(
    alone: Group, monkeypatch: pytest.MonkeyPatch, before: int | None, told: int
) -> None:
    """Totals cannot be compared: members send each other different numbers of messages when a
    group forms."""
    script = Script(alone)
    monkeypatch.setattr(alone, "collectives", lambda: 2)
    script.clock.collectives_reduced = before
    script.reporter.answer_stacks(stacks_pb2.StacksRequest())
    (answer,) = script.wire.taken("stacks")
    assert answer.collectives == told


def test_a_full_request_for_stacks_is_answered_with_all_threads(alone: Group) -> None:
    script, done = Script(alone), threading.Event()
    thread = threading.Thread(target=done.wait, name="waits", daemon=True)
    thread.start()
    try:
        script.reporter.answer_stacks(stacks_pb2.StacksRequest())
    finally:
        done.set()
        thread.join()
    (answer,) = script.wire.taken("stacks")
    assert "waits" in [told.name for told in answer.processes[0].threads]


def test_a_path_of_400_characters_is_sent_whole() -> None:
    path = f"/{'d' * 400}/train.py"
    called: dict[str, Any] = {"own_stacks": own_stacks}
    exec(compile("told = own_stacks(brief=True)", path, "exec"), called)
    assert path in [frame.file for frame in called["told"].threads[0].frames]


def test_a_request_for_stretches_is_answered_with_the_newest_steps(alone: Group) -> None:
    script = Script(alone)
    now = time.monotonic()
    script.clock.spent.entered(now, 1, join_s=0.0, sync_s=0.0)
    for step in (1, 2, 3):
        script.clock.spent.commit(now + step, 1.0, step)
    script.reporter.answer_stacks(stacks_pb2.StacksRequest(request=3, stretches=2))
    (answer,) = script.wire.taken("stacks")
    assert (answer.request, len(answer.processes)) == (3, 0)
    assert [stretch.step for stretch in answer.stretches] == [2, 3]
    assert answer.stretches[0].began_unix_s == pytest.approx(time.time() + 1.0, abs=5.0)


def test_a_worker_without_a_group_answers_a_probe() -> None:
    script = Script()
    script.reporter.answer_probe()
    (answer,) = script.wire.taken("progress")
    assert (answer.generation, answer.committed, answer.in_step_s) == (0, 0, 0.0)


def test_rank_0_sends_each_step_of_the_ledger_once(alone: Group) -> None:
    script = Script(alone)
    script.commit(0, 1)
    assert script.ledger() == [0, 1]
    assert script.ledger() == []
    script.commit(2)
    assert script.ledger() == [2]


def test_report_again_sends_all_entries_that_are_not_stored(alone: Group) -> None:
    script = Script(alone)
    script.commit(0, 1, 2)
    script.ledger()
    script.reporter.ledger_stored(1, "", 1)
    script.reporter.report_again()
    assert script.ledger() == [1, 2]
    assert script.ledger() == []


def test_only_the_first_report_is_whole_even_if_it_is_empty(alone: Group) -> None:
    script = Script(alone)
    for ask in (lambda: None, script.reporter.report_again):
        ask()
        script.reporter.flush()
        (entries,) = script.wire.taken("ledger")
        assert entries.whole
        assert list(entries.entries) == []
        script.commit(len(script.state.ledger.since(0)))
        script.reporter.flush()
        (entries,) = script.wire.taken("ledger")
        assert not entries.whole
        script.reporter.ledger_stored(99, "", 1)


def test_rank_0_sends_all_entries_in_a_new_group(alone: Group) -> None:
    script = Script(alone)
    script.commit(0, 1)
    script.ledger()
    script.reporter.entered(alone, Outcome())
    assert script.ledger() == [0, 1]


def test_a_member_of_another_rank_than_0_sends_no_ledger(
    alone: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "rank", 1)
    script = Script(alone)
    script.commit(0)
    assert script.ledger() == []


def test_a_worker_without_a_group_sends_no_ledger() -> None:
    script = Script()
    script.commit(0)
    assert script.ledger() == []


def test_progress_carries_durations_of_steps_and_samples(alone: Group) -> None:
    script = Script(alone)
    for _ in range(3):
        script.clock.commit(samples=8)
    script.reporter.flush()
    (progress,) = script.wire.taken("progress")
    assert list(progress.step_counts) == script.clock.durations.counts
    assert sum(progress.step_counts) == 2
    assert progress.steps_total_s == script.clock.durations.total
    assert progress.samples == 24


def test_a_recomputed_step_is_reported_once(alone: Group) -> None:
    script = Script(alone)
    for given_up in (1, 0):
        if given_up:
            script.clock.given_up += 1
        script.reporter.entered(alone, Outcome())
        script.reporter.committed()
        script.reporter.flush()
        (reformed,) = script.wire.taken("reformed")
        assert reformed.recomputed == given_up


def test_the_first_step_of_a_group_reports_how_long_the_worker_was_out(alone: Group) -> None:
    script = Script(alone)
    script.clock.entered(1, join_s=0.0, sync_s=0.0)
    script.reporter.entered(alone, Outcome())
    script.reporter.committed()
    script.reporter.flush()
    (never_before,) = script.wire.taken("reformed")
    script.clock.spent.left(time.monotonic() - 5.0, in_step=True)
    script.clock.entered(2, join_s=0.0, sync_s=0.0)
    script.reporter.entered(alone, Outcome())
    script.reporter.committed()
    script.reporter.flush()
    (after_a_loss,) = script.wire.taken("reformed")
    assert never_before.out_s == 0.0
    assert 5.0 <= after_a_loss.out_s < 60.0


@pytest.mark.parametrize("source", ["", "initial"])
def test_join_times_are_reported_with_the_first_step_of_a_group(alone: Group, source: str) -> None:
    script = Script(alone)
    script.reporter.entered(alone, Outcome(source=source))
    script.reporter.flush()
    assert script.wire.taken("reformed") == []
    script.reporter.committed()
    script.reporter.committed()
    script.reporter.flush()
    (reformed,) = script.wire.taken("reformed")
    assert isinstance(reformed, job_pb2.Reformed)
    assert (reformed.generation, reformed.source) == (1, source)
    assert (reformed.join_s, reformed.sync_s) == (0.5, 0.25)
    script.reporter.flush()
    assert script.wire.taken("reformed") == []


def test_progress_marks_the_first_step_of_a_group(alone: Group) -> None:
    script = Script(alone)
    told = []
    for _ in range(2):
        script.clock.begin()
        script.reporter.answer_probe()
        told.append(script.wire.taken("progress")[0].first_step)
        script.clock.commit(1)
    assert told == [True, False]


def test_progress_reports_a_compilation_that_is_under_way() -> None:
    script, told = Script(), []
    for under_way in (False, True, True, False):
        script.compilations.under_way = under_way
        script.reporter.flush()
        script.reporter.answer_probe()
        told.append([p.compiling for p in script.wire.taken("progress")])
    assert told == [[False] * 2, [True] * 2, [True] * 2, [False] * 2]


class Odd:
    def __float__(self) -> float:
        raise KeyError("of the script")


def test_odd_figures_of_a_script_do_not_stop_the_reports(alone: Group) -> None:
    script = Script(alone)
    script.commit(0)
    odd = {"huge": 10**400, "odd": Odd(), "text": "high", "\udcff": 1.0, "loss": 0.5}
    script.reporter.report(odd, committed=False)
    script.reporter.report({f"figure {n}": n for n in range(1000)}, committed=False)
    script.reporter.report({"n" * 1000: 1.0, "loss": 0.25}, committed=False)
    assert script.ledger() == [0]
    (progress,) = script.wire.taken("progress")
    assert progress.reported["loss"] == 0.25
    assert len(progress.reported) <= 100
    assert max(map(len, progress.reported)) == 100


def test_failed_reports_give_one_notice_and_later_reports_are_sent(
    alone: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(alone)
    script.state.job = cast(Any, None)  # as a defect in this project might leave it
    for _ in range(3):
        script.reporter.flush()
    (notice,) = script.wire.taken("notice")
    assert notice.name == "report_failed"
    assert notice.fields["worker"] == "w"
    assert "AttributeError" in notice.fields["message"]
    assert "Traceback" in capsys.readouterr().err
    script.state.job = At(Progress(committed=3))
    script.reporter.flush()
    assert script.wire.taken("progress")[-1].committed == 3


def test_a_long_ledger_is_split_into_messages_below_one_mib(alone: Group) -> None:
    script = Script(alone)
    script.commit(*range(25_000))
    script.reporter.flush()
    messages = script.wire.taken("ledger")
    script.reporter.ledger_stored(committed=20_000, run="", generation=1)
    script.reporter.flush()
    messages += script.wire.taken("ledger")
    assert [m.whole for m in messages] == [True, False, False]
    assert [e.step for m in messages for e in m.entries] == list(range(25_000))
    assert max(m.ByteSize() for m in messages) < 1 << 20


def test_rank_0_reports_learning_rates_and_the_global_batch(alone: Group) -> None:
    script = Script(alone)
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [
        {"params": [weights[0]], "lr": 0.1},
        {"params": [weights[1]], "lr": torch.tensor(0.5)},
    ]
    script.state.track({"sgd": torch.optim.SGD(weights, lr=0.25), "two": torch.optim.Adam(groups)})
    script.clock.commit(64)
    script.reporter.flush()
    (progress,) = script.wire.taken("progress")
    assert dict(progress.learning_rates) == {"sgd": 0.25, "two/0": 0.1, "two/1": 0.5}
    assert progress.global_batch == 64


def test_the_reporter_wakes_and_sends_the_pace_once_its_sums_are_taken(alone: Group) -> None:
    script = Script(alone)
    script.clock.entered(1, join_s=0.0, sync_s=0.0, world_size=1)
    script.reporter.flush()
    assert not script.wire.taken("progress")[0].HasField("pace")
    for committed in range(1, 9):
        script.clock.begin()
        script.clock.commit(4, committed)
    assert script.reporter._wake.is_set()
    script.reporter.flush()
    (progress,) = script.wire.taken("progress")
    assert (progress.pace.generation, progress.pace.committed) == (1, 8)
