"""Operators' commands: output as text and as JSON, and messages when nobody leads the job."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic.cli import main, operator
from elastic.cli.operator import Target
from elastic.core.documents import to_json
from elastic.errors import ConfigurationError, ExitCode, TransientError
from elastic.rpc.control import ControlServer
from elastic.rpc.security import PLAINTEXT, Security, Tls
from elastic.runtime.journal import Entry
from elastic.runtime.run_directory import RunningJob
from elastic.settings.operator import LocalSettings, OperatorSettings
from elastic.settings.security import SecuritySettings
from elastic.settings.store import StoreSettings
from elastic.settings.tls_files import TlsFiles
from elastic.store.job_documents import LeaderDocument
from elastic.store.job_keys import JobKeys
from elastic.store.job_runs import RunEnd
from elastic.v1 import control_pb2 as pb
from elastic.v1 import job_pb2, stacks_pb2
from tests.certificates import make_certificates, sign_for_job
from tests.chrome_trace import check_trace
from tests.unit.rpc.conversation import Recorder
from tests.unit.store.failing_store import Clock, FailingStore

DEADLINE_S = 60.0
WORKER = job_pb2.WorkerStatus(worker="n1-1", phase=6, slot=0, committed=2**33, pid=11)
ACCOUNTS = {
    "wanted_slots": 3,
    "slot_seconds": 400.0,
    "goodput": 0.9,
    "kinds": {"productive": 360.0, "start_up": 30.5, "hang": 9.5, "join": 0.0},
    "nodes": [
        {"node": "", "lost_s": 20.0, "kinds": {"start_up": 20.0}},
        {"node": "n1", "lost_s": 0.0, "kinds": {}},
        {"node": "n2", "lost_s": 20.0, "kinds": {"start_up": 10.5, "hang": 9.5}},
    ],
    "incidents": [
        {
            "number": 1,
            "unix_s": 1.75e9,
            "reason": "member_lost",
            "nodes": ["n2"],
            "workers": ["n2-1", "n2-2", "n2-3", "n2-4"],
            "generation": 4,
            "lost_s": 20.0,
            "seconds": {"start_up": 10.5, "hang": 9.5},
        }
    ],
}
STATUS = pb.JobStatus(
    min_workers=2,
    wanted_workers=3,
    job="digits",
    phase="running",
    coordinator="10.0.0.1:1",
    generation=job_pb2.Generation(number=4, members=[job_pb2.Member(worker="n1-1", node="n1@01")]),
    nodes=[
        pb.NodeStatus(node="n1", host="h1", slots=2, workers=[WORKER], state="ready"),
        pb.NodeStatus(
            node="n2",
            machine="m2",
            state="drained",
            reason="a new disk",
            failures=3,
            longest_pause_s=0.061,
        ),
    ],
    progress=job_pb2.Progress(committed=2**33, epoch=1, step_s=0.1, samples_per_s=64.0),
    restarts=1,
    max_restarts=3,
    recoveries_json=['{"generation": 4, "reason": "member_lost", "total_s": 0.05}'],
    checkpoint_step=7,
    checkpoint_dir="/checkpoints",
    longest_pause_s=0.25,
    accounts_json=json.dumps(ACCOUNTS),
)
FRAME = stacks_pb2.Frame(file="/job/data.py", line=41, function="__getitem__")
MAIN_THREAD = stacks_pb2.ThreadStack(name="MainThread", frames=[FRAME], left_out=3)
STACKS = stacks_pb2.JobStacks(
    verdict="rank 1 hangs",
    ranks=[
        stacks_pb2.RankStacks(
            rank=1,
            node="n2",
            is_member=True,
            stacks=stacks_pb2.WorkerStacks(
                worker="n2-1",
                answer=stacks_pb2.ANSWER_GIVEN,
                place=stacks_pb2.PLACE_DATA,
                place_s=34.0,
                committed=7,
                processes=[
                    stacks_pb2.ProcessStacks(pid=11, name="train.py", threads=[MAIN_THREAD]),
                    stacks_pb2.ProcessStacks(pid=12, name="loader\x1b[2J"),
                ],
            ),
        ),
        stacks_pb2.RankStacks(
            node="n3",
            stacks=stacks_pb2.WorkerStacks(worker="n3-1", answer=stacks_pb2.ANSWER_STOPPED),
        ),
    ],
)
INCIDENT = {
    "number": 3,
    "unix_s": 1.0,
    "cause": "hang",
    "summary": "the group stood still at step 7 for 20.0 s: rank 1 hangs",
    "noticed_by": "the coordinator: no step was committed for 20.0 s",
    "outcome": "recovered",
    "lasted_s": 22.25,
    "generation": 4,
    "world_size": 3,
    "followed_by": 6,
    "world_size_after": 2,
    "committed": 7,
    "steps_again": 1,
    "steps_lost": 0,
    "samples_given_up": 64,
    "recovery": {"detect_s": 22.0, "persist_s": 0.01, "first_step_s": 0.2},
    "noticed": [
        {
            "after_s": 20.0,
            "sign": "overdue",
            "node": "",
            "worker": "",
            "rank": None,
            "detail": "",
        },
        {
            "after_s": 21.5,
            "sign": "worker_ended",
            "node": "n2",
            "worker": "n2-1",
            "rank": 1,
            "detail": "",
        },
    ],
    "processes": [
        {
            "after_s": 21.5,
            "node": "n2",
            "rank": 1,
            "worker": "n2-1",
            "kind": "left_out",
            "code": 0,
            "message": "hung 22 s in train.py:47",
            "place": "/job/train.py:47",
            "traceback": "",
            "log_tail": "the same stacks",
            "log": "/logs/n2-1.log",
        },
        {
            "after_s": 21.6,
            "node": "n3",
            "rank": None,
            "worker": "n3-1",
            "kind": "signal",
            "code": 9,
            "message": "was ended by SIGKILL (signal 9)",
            "place": "",
            "traceback": "",
            "log_tail": "loading\x1b[2J\nloaded",
            "log": "",
        },
    ],
    "further_processes": 0,
    "hang": {
        "generation": 4,
        "step": 7,
        "standing_s": 20.0,
        "verdict": "rank 1 hangs",
        "stacks": [
            {"rank": 1, "node": "n2", "worker": "n2-1", "doing": "is there", "text": "File x"}
        ],
    },
    "saves": None,
    "saves_lost": [],
    "verdict": "",
    "nodes": ["n2"],
    "workers": ["n2-1"],
    "lost_s": 66.0,
    "seconds": {"hang": 60.0, "join": 6.0},
}
EVENTS = [
    Entry(unix_s=1.0, name="node_lost", fields={"node": "n1", "reason": ""}),
    Entry(unix_s=2.0, name="elected", fields={"address": "h:1", "members": []}),
]


class Leader(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.error: TransientError | None = None
        self.job = STATUS
        self.asked: list[tuple[str, str, str]] = []
        self.known: str | None = json.dumps(INCIDENT)

    def status(self) -> pb.JobStatus:
        if self.error is not None:
            raise self.error
        return self.job

    def stop(self, reason: str, exit_code: int) -> None:
        self.asked.append(("stop", reason, str(exit_code)))

    async def drain(self, name: str, reason: str, *, future: bool) -> str:
        del future
        self.asked.append(("drain", name, reason))
        return f"the workers of {name} leave"

    async def stacks(self, of: str) -> stacks_pb2.JobStacks:
        self.asked.append(("stacks", of, ""))
        return STACKS

    def incidents(self, number: int | None) -> list[str]:
        if self.known is None:
            return []
        if number not in (None, 0, 3):
            raise ConfigurationError(f"there is no incident {number}")
        return [self.known]

    async def clear(self, name: str) -> str:
        self.asked.append(("clear", name, ""))
        return f"{name} may take part again"

    async def follow_events(self, *, follow: bool) -> AsyncIterator[str]:
        assert not follow
        for entry in EVENTS:
            yield entry.to_json()

    def operators(self) -> Leader:
        return self

    def agents(self) -> None:
        raise AssertionError("no agent comes here")


class Place:
    """A leader in a thread of its own, because commands run an event loop themselves."""

    def __init__(self, address: str, security: Security = PLAINTEXT) -> None:
        self.leader = Leader()
        self.target = Target(address=address)
        self._security = security
        self._loop = asyncio.new_event_loop()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._over = asyncio.Event()

    async def _serve(self) -> None:
        server = ControlServer(self.leader, self.target.address or "", security=self._security)
        self.target = Target(address=await server.start())
        self._listens.set()
        await self._over.wait()
        await server.stop(0)

    def start(self) -> None:
        self._thread.start()
        assert self._listens.wait(DEADLINE_S)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(DEADLINE_S)
        self._loop.close()


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        made = Place(f"unix:{directory}/c.sock")
        made.start()
        yield made
        made.end()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """Certificates of the job digits."""
    return sign_for_job(make_certificates(tmp_path_factory.mktemp("tls") / "made"), "digits")


@pytest.fixture
def protected(certificates: TlsFiles) -> Iterator[Place]:
    """A leader that accepts only certificates of its job."""
    made = Place("127.0.0.1:0", Tls(job="digits", files=certificates))
    made.start()
    yield made
    made.end()


Printed = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def document(capsys: Printed) -> Any:
    return json.loads(capsys.readouterr().out)


def test_status_is_shown_as_text(place: Place, capsys: Printed) -> None:
    operator.status(place.target, output="table")
    shown = capsys.readouterr().out
    for part in (
        "job digits: running, 1 of 3 workers (at least 2)",
        "generation 4, restarts 1 of 3",
        "coordinator 10.0.0.1:1 (in doubt: the store does not answer)",
        "last checkpoint: step 7 in /checkpoints",
        "n1-1",
        "training",
        "recovery to generation 4 (member_lost): 50 ms",
        "goodput 90.0%, lost mostly: start_up 30.5 s, hang 9.50 s (elastic report)",
        "longest pause of the coordinator: 250 ms",
        "longest pause of the agent of n2: 61 ms",
    ):
        assert part in shown


def test_status_is_printed_as_json(place: Place, capsys: Printed) -> None:
    operator.status(place.target, output="json")
    shown = document(capsys)
    assert shown["job"] == "digits"
    assert shown["progress"]["committed"] == 2**33
    assert shown["nodes"][0]["workers"][0]["committed"] == 2**33
    assert shown["leads"] is False
    assert shown["recoveries"] == [{"generation": 4, "reason": "member_lost", "total_s": 0.05}]
    assert shown["accounts"] == ACCOUNTS


def test_report_is_shown_as_tables(place: Place, capsys: Printed) -> None:
    operator.report(place.target, output="table")
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    incident = "member lost, generation 4 n2 n2-1, n2-2, n2-3 and 1 more 20.0 s start_up 10.5 s"
    assert shown[:5] == [
        "job digits: goodput 90.0%, 6.7 min of wanted slots (3 now)",
        "kind slot time share",
        "productive 6.0 min 90.0%",
        "start_up 30.5 s 7.6%",
        "hang 9.50 s 2.4%",
    ]
    assert any(incident in line for line in shown)
    assert shown[-3:] == [
        "node lost mostly",
        "(no node) 20.0 s start_up 20.0 s",
        "n2 20.0 s start_up 10.5 s, hang 9.50 s",
    ]


def test_report_is_printed_as_json(place: Place, capsys: Printed) -> None:
    operator.report(place.target, output="json")
    assert document(capsys) == {"job": "digits", **ACCOUNTS}


def test_nodes_are_shown_as_a_table(place: Place, capsys: Printed) -> None:
    operator.nodes(place.target, output="table")
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "node",
        "machine",
        "state",
        "host",
        "slots",
        "training",
        "failures",
        "since",
        "reason",
    ]
    assert first.split()[:7] == ["n1", "-", "ready", "h1", "2", "1", "0"]
    assert second.split()[:7] == ["n2", "m2", "drained", "-", "0", "0", "3"]
    assert second.rstrip().endswith("a new disk")


def test_nodes_are_printed_as_json(place: Place, capsys: Printed) -> None:
    operator.nodes(place.target, output="json")
    assert [(n["node"], n["state"], n["reason"]) for n in document(capsys)] == [
        ("n1", "ready", ""),
        ("n2", "drained", "a new disk"),
    ]


@pytest.mark.parametrize("command", [operator.status, operator.nodes, operator.report])
def test_an_unknown_output_format_is_refused(place: Place, command: Any) -> None:
    with pytest.raises(ConfigurationError, match="--output 'yaml' is not allowed; expected table"):
        command(place.target, output="yaml")


def test_drain_clear_and_stop_are_done_and_confirmed(place: Place, capsys: Printed) -> None:
    operator.drain(place.target, "n1", reason="a new disk")
    operator.nodes(place.target, clear="n1", output="table")
    operator.stop(place.target, reason="the budget is spent")
    assert place.leader.asked == [
        ("drain", "n1", "a new disk"),
        ("clear", "n1", ""),
        ("stop", "the budget is spent", "82"),
    ]
    assert capsys.readouterr().out.splitlines() == [
        "the workers of n1 leave",
        "n1 may take part again",
        "the job saves and ends at the next step boundary",
    ]


def test_stop_without_a_checkpoint_directory_says_so(place: Place, capsys: Printed) -> None:
    place.leader.job = pb.JobStatus(job="digits")
    operator.stop(place.target, reason="")
    said = capsys.readouterr().out
    assert "nothing is saved, because it has no checkpoint directory" in said
    assert "within --stop-grace-s: there is no group now" in said


def test_stacks_are_shown_as_text(place: Place, capsys: Printed) -> None:
    operator.stacks(place.target, "", output="table")
    assert capsys.readouterr().out.splitlines() == [
        "rank 1 (node n2, worker n2-1), step 7: is loading data, in `__getitem__`, data.py:41, "
        "for 34 s",
        "  process 11: train.py",
        "    MainThread (most recent call first):",
        '      File "/job/data.py", line 41 in __getitem__',
        "      and 3 more",
        "  child 12: loader\\x1b[2J",
        "",
        "no rank (node n3, worker n3-1): is stopped by a signal",
        "",
        "rank 1 hangs",
    ]
    assert place.leader.asked == [("stacks", "", "")]


def test_stacks_without_a_group_give_a_hint_on_stderr(
    place: Place, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.STACKS", stacks_pb2.JobStacks())
    operator.stacks(place.target, "", output="table")
    out, err = capsys.readouterr()
    assert not out
    assert "no worker is in a group; `elastic status`" in err


def test_stacks_are_printed_as_json(place: Place, capsys: Printed) -> None:
    operator.stacks(place.target, "1", output="json")
    found = document(capsys)
    assert found["verdict"] == "rank 1 hangs"
    first, second = found["ranks"]
    assert {k: first[k] for k in ("rank", "node", "answer", "place", "place_s", "step")} == {
        "rank": 1,
        "node": "n2",
        "answer": "given",
        "place": "data",
        "place_s": 34.0,
        "step": 7,
    }
    frame = {"file": "/job/data.py", "line": 41, "function": "__getitem__"}
    thread = {"name": "MainThread", "frames": [frame], "left_out": 3}
    assert first["processes"][0] == {"pid": 11, "name": "train.py", "threads": [thread]}
    assert (second["rank"], second["answer"]) == (None, "stopped")
    assert place.leader.asked == [("stacks", "1", "")]


def test_incidents_are_shown_as_a_table(place: Place, capsys: Printed) -> None:
    operator.incidents(place.target, output="table")
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["incident", "at", "step", "took", "lost", "what"]
    assert line.split()[0] == "3"
    assert line.split()[3:] == f"7 22.2 s 66.0 s {INCIDENT['summary']}".split()


def test_explain_shows_an_incident_on_one_page(place: Place, capsys: Printed) -> None:
    operator.explain(place.target, 3, output="table")
    assert capsys.readouterr().out.splitlines()[1:] == [
        "what failed:  the group stood still at step 7 for 20.0 s: rank 1 hangs",
        "noticed by:   the coordinator: no step was committed for 20.0 s",
        "outcome:      trained on 22.2 s after the first sign",
        "group:        generation 4 of 3 workers, followed by generation 6 of 2",
        "last commit:  step 7; 1 step was begun and computed again (64 samples)",
        "phases:       detect 22.0 s, persist 0.01 s, first_step 0.20 s",
        "lost:         66.0 s of slot time (hang 60.0 s, join 6.00 s)",
        "signs, in order:",
        "    +20.000 s  overdue, coordinator",
        "    +21.500 s  worker ended, node n2, rank 1",
        "",
        "n2:1 (worker n2-1) hung 22 s in train.py:47",
        "  its log on that node: /logs/n2-1.log",
        "",
        "n3:- (worker n3-1) was ended by SIGKILL (signal 9)",
        "  the end of its log:",
        "    n3:-| loading\\x1b[2J",
        "    n3:-| loaded",
        "",
        "n2:1 (worker n2-1) is there",
        "    n2:1| File x",
    ]


def test_incidents_are_printed_as_json(place: Place, capsys: Printed) -> None:
    operator.explain(place.target, None, output="json")
    assert document(capsys) == INCIDENT
    operator.incidents(place.target, output="json")
    assert json.loads(capsys.readouterr().out) == [INCIDENT]


def test_a_missing_incident_is_named(place: Place, capsys: Printed) -> None:
    with pytest.raises(ConfigurationError, match="no incident 7"):
        operator.explain(place.target, 7, output="table")
    for known in (INCIDENT["number"], "none"):  # no message has room for such a number
        with pytest.raises(ConfigurationError, match=f"no incident {10**20}; known: {known}"):
            operator.explain(place.target, 10**20, output="table")
        place.leader.known = None
    operator.explain(place.target, None, output="table")
    operator.incidents(place.target, output="table")
    assert capsys.readouterr().out.splitlines() == 2 * ["no incident has been recorded"]


def test_trace_writes_to_a_file_or_stdout(place: Place, tmp_path: Path, capsys: Printed) -> None:
    operator.trace(place.target, tmp_path / "trace.json", steps=10)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"{tmp_path}/trace.json: 0 steps of 0 workers; 10 workers did not report"
    written = json.loads((tmp_path / "trace.json").read_text())
    check_trace(written)
    assert [e["name"] for e in written["traceEvents"] if e["ph"] == "i"] == ["node_lost", "elected"]
    operator.trace(place.target, Path("-"), steps=10)
    assert json.loads(capsys.readouterr().out) == written


def test_a_trace_that_cannot_be_written_is_refused(place: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write the trace to .*; choose another"):
        operator.trace(place.target, tmp_path, steps=10)


def test_status_shows_the_verdict_on_a_holdup(
    monkeypatch: pytest.MonkeyPatch, place: Place, capsys: Printed
) -> None:
    held_up = pb.JobStatus(verdict="rank 1 hangs", verdict_unix_s=1.0)
    held_up.MergeFrom(STATUS)
    monkeypatch.setattr(place.leader, "status", lambda: held_up)
    operator.status(place.target, output="table")
    assert re.search(r"^held up at \d\d:\d\d:\d\d: rank 1 hangs$", capsys.readouterr().out, re.M)


def test_events_are_printed_as_json_lines(place: Place, capsys: Printed) -> None:
    assert operator.events(place.target, follow=False, output="json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [entry.to_json() for entry in EVENTS]


def test_events_as_text_are_sentences_or_their_fields(place: Place, capsys: Printed) -> None:
    """Fields stand for an event without a sentence, and for one of another version."""
    assert operator.events(place.target, follow=False, output="table") == 0
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "node_lost: lost contact with the agent of node n1",
        "elected: address=h:1 members=[]",
    ]


def test_a_coordinator_that_does_not_lead_says_so(place: Place) -> None:
    place.leader.error = TransientError("the coordinator at h:1 does not lead now")
    with pytest.raises(TransientError, match="h:1 does not lead now"):
        operator.status(place.target, output="json")


def test_an_address_where_nobody_answers_is_a_transient_error(tmp_path: Path) -> None:
    target = Target(address=f"unix:{tmp_path}/nobody.sock")
    for ask in (operator.status, operator.nodes):
        with pytest.raises(TransientError, match=r"nobody\.sock does not answer.*still running"):
            ask(target, output="json")
    with pytest.raises(TransientError, match=r"nobody\.sock"):
        operator.events(target, follow=True, output="json")


@pytest.fixture
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("elastic.runtime.run_directory._LAST_RESORT", str(tmp_path))


@pytest.mark.usefixtures("empty_machine")
def test_status_without_a_job_on_this_machine_is_a_transient_error() -> None:
    with pytest.raises(TransientError, match="no job named 'digits' runs on this machine"):
        operator.status(Target(job="digits"), output="json")


@pytest.mark.usefixtures("empty_machine")
@pytest.mark.parametrize("source", ["option", "variable", "file", "none"])
def test_the_job_of_this_machine_is_named_by_option_variable_or_file(
    source: str, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[job]\njob = "digits"\n' if source == "file" else "")
    options = ["--job", "digits"] if source == "option" else []
    environment = {"ELASTIC_JOB": "digits"} if source == "variable" else {}
    arguments = ["stop", "--config", str(file), *options]
    asked = CliRunner().invoke(main.app, arguments, env=environment)
    which = "no job" if source == "none" else "no job named 'digits'"
    assert f"elastic: {which} runs on this machine" in asked.output
    assert asked.exit_code == ExitCode.TEMPORARY


@pytest.mark.usefixtures("empty_machine")
def test_timeout_s_applies_to_a_job_of_this_machine() -> None:
    refused = CliRunner().invoke(main.app, ["status", "--timeout-s", "soon"])
    assert refused.exit_code == ExitCode.CONFIGURATION
    assert Target(local=LocalSettings(timeout_s=2.0)).timeout_s == 2.0


def test_a_remote_address_is_refused_without_certificates() -> None:
    with pytest.raises(
        ConfigurationError, match=r"10\.0\.0\.1:29400 can be reached.*no certificate.*--tls-ca"
    ):
        operator.status(Target(address="10.0.0.1:29400"), output="json")


def at_address(place: Place, *options: str | Path) -> Any:
    arguments = ["status", "--output", "json", "--address", place.target.address, *options]
    return CliRunner().invoke(main.app, [str(argument) for argument in arguments])


def test_an_address_is_asked_with_the_certificates_of_the_job(
    protected: Place, certificates: TlsFiles
) -> None:
    files = certificates
    tls = ("--tls-ca", files.ca, "--tls-cert", files.certificate, "--tls-key", files.key)
    asked = at_address(protected, "--job", "digits", *map(str, tls))
    assert asked.exit_code == 0, asked.output
    assert json.loads(asked.stdout)["job"] == "digits"
    refused = at_address(protected, "--job", "letters", *map(str, tls))
    assert refused.exit_code == ExitCode.CONFIGURATION
    assert "letters.job.elastic" in refused.output
    half = at_address(protected, "--tls-ca", str(files.ca))
    assert half.exit_code == ExitCode.CONFIGURATION
    assert "--tls-ca: mutual TLS also needs --tls-cert, --tls-key" in half.output


@pytest.mark.parametrize("address", ["host", "host:x", "host:99999", "http://host:1"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--address: '{address}' is not allowed"):
        operator.status(Target(address=address), output="json")


class Opened(FailingStore):
    """A store that a command can open."""

    async def __aenter__(self) -> Opened:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is held open."""


FAR = Target(
    settings=OperatorSettings(
        job="digits",
        timeout_s=0.2,
        security=SecuritySettings(insecure=True),
        store=StoreSettings(etcd=("127.0.0.1:1",)),
    )
)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_missing_leader_or_a_silent_store_is_a_transient_error(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    def open_store(_settings: StoreSettings, *, total_timeout_s: float, **_: object) -> Opened:
        assert total_timeout_s < 0.2
        store = Opened(Clock())
        if hangs:
            store.hangs["get"] = asyncio.Event()
        return store

    monkeypatch.setattr(operator, "open_store", open_store)
    expected = (
        r"etcd did not answer within 0\.2 s.*--timeout-s"
        if hangs
        else "no coordinator leads the job 'digits' now"
    )
    for ask in (operator.status, operator.nodes):
        with pytest.raises(TransientError, match=expected):
            ask(FAR, output="json")


def test_the_leader_is_found_in_the_store(
    monkeypatch: pytest.MonkeyPatch, place: Place, capsys: Printed
) -> None:
    store = Opened(Clock())
    document = LeaderDocument(candidate="c", address=place.target.address or "")
    asyncio.run(store.put(JobKeys("digits").leader, to_json(document)))
    monkeypatch.setattr(operator, "open_store", lambda _settings, **_: store)
    slow = dataclasses.replace(FAR.settings, timeout_s=DEADLINE_S)  # type: ignore[type-var]
    operator.status(Target(settings=slow), output="json")
    assert json.loads(capsys.readouterr().out)["job"] == "digits"


ENDED = RunEnd(run_id="default", exit_code=0, committed=57, ended_unix_s=1e9)
STOPPED_RUN = RunEnd(
    run_id="second", exit_code=82, message="maintenance", committed=99, ended_unix_s=2e9
)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Target:
    """A job with two ended runs. A command that waited for a leader would never return."""
    store = Opened(Clock())

    async def end_all() -> None:
        for end in (ENDED, STOPPED_RUN):
            value = json.dumps(dataclasses.asdict(end)).encode()
            await store.put(JobKeys("digits").end(end.run_id), value)

    asyncio.run(end_all())
    monkeypatch.setattr(operator, "open_store", lambda _settings, **_: store)
    settings = dataclasses.replace(FAR.settings, timeout_s=1e6)  # type: ignore[type-var]
    return Target(settings=settings)


def test_status_of_an_ended_run_shows_how_it_ended(ended: Target, capsys: Printed) -> None:
    operator.status(ended, output="table")
    shown = capsys.readouterr().out
    for part in (
        "job digits: ended, run second: stopped by an operator (exit code 82)",
        "step 99, at 2033-05-1",
        "maintenance",
        "another --run-id, or after `elastic forget second --job digits`",
    ):
        assert part in shown
    operator.status(ended, output="json")
    assert document(capsys) == {
        "job": "digits",
        "phase": "ended",
        "meaning": "stopped by an operator",
        "run_id": "second",
        "exit_code": 82,
        "message": "maintenance",
        "committed": 99,
        "ended_unix_s": 2e9,
    }


def test_status_of_a_run_that_was_left_says_how_it_goes_on(ended: Target, capsys: Printed) -> None:
    left = dataclasses.replace(STOPPED_RUN, exit_code=143, left=True)
    store = operator.open_store(ended.settings)  # type: ignore[arg-type, call-arg]
    value = json.dumps(dataclasses.asdict(left)).encode()
    asyncio.run(store.put(JobKeys("digits").end("second"), value))
    operator.status(ended, output="json")
    assert document(capsys)["phase"] == "left"
    operator.status(ended, output="table")
    assert "start it again to go on from its newest checkpoint" in capsys.readouterr().out


def test_trace_of_an_ended_run_is_refused(ended: Target, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="there is no trace, because the job does not run: run 'second'"
    ):
        operator.trace(ended, tmp_path / "trace.json", steps=10)
    assert not [*tmp_path.iterdir()]


def test_nodes_of_an_ended_run_are_an_empty_list(ended: Target, capsys: Printed) -> None:
    operator.nodes(ended, output="json")
    printed = capsys.readouterr()
    assert json.loads(printed.out) == []
    assert "run 'second' of job 'digits' ended at " in printed.err


@pytest.mark.parametrize("follow", [False, True])
def test_events_of_an_ended_run_are_empty(ended: Target, capsys: Printed, follow: bool) -> None:
    assert operator.events(ended, follow=follow, output="json") == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "run 'second' of job 'digits' ended at " in printed.err


@pytest.mark.parametrize(
    "change",
    [
        lambda target: operator.stop(target, reason="why"),
        lambda target: operator.drain(target, "n1", reason="why"),
        lambda target: operator.nodes(target, clear="n1", output="table"),
    ],
    ids=["stop", "drain", "clear"],
)
def test_commands_that_would_change_an_ended_run_are_refused(
    ended: Target, change: Callable[[Target], None]
) -> None:
    told = r"nothing was changed.*stopped by an operator.*run 'second'.*exit code 82: maintenance"
    with pytest.raises(ConfigurationError, match=told):
        change(ended)


def test_a_newer_run_without_a_leader_is_not_reported_as_ended(
    ended: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = operator.open_store(ended.settings)  # type: ignore[arg-type, call-arg]
    asyncio.run(store.put(JobKeys("digits").run, b"third"))
    monkeypatch.setattr(operator, "open_store", lambda _settings, **_: store)
    with pytest.raises(TransientError, match="no coordinator leads the job 'digits' now"):
        operator.status(FAR, output="json")


class Handover(Opened):
    """A store where nobody leads at first, then `silent`, which never answers, then `address`."""

    def __init__(self, address: str, silent: str) -> None:
        super().__init__(Clock())
        self._answers = [None, silent, address]

    async def get(self, key: str) -> Any:
        address = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if address is None:
            return None
        await self.put(key, to_json(LeaderDocument(candidate="c", address=address)))
        return await super().get(key)


@pytest.mark.parametrize("hangs", [False, True], ids=["has ended", "is stopped"])
def test_a_command_waits_for_the_next_leader_and_asks_it(
    monkeypatch: pytest.MonkeyPatch, place: Place, capsys: Printed, hangs: bool
) -> None:
    monkeypatch.setattr(operator, "_MIN_ATTEMPT_S", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if hangs:
            silent.listen()
        port = silent.getsockname()[1]
        store = Handover(place.target.address or "", f"127.0.0.1:{port}")
        monkeypatch.setattr(operator, "open_store", lambda _settings, **_: store)
        settings = dataclasses.replace(FAR.settings, timeout_s=8.0)  # type: ignore[type-var]
        operator.drain(Target(settings=settings), "n1", reason="a new disk")
    printed = capsys.readouterr()
    assert printed.out == "the workers of n1 leave\n"
    assert printed.err.count("no coordinator leads the job 'digits' now; looking for a leader") == 1
    assert ("drain", "n1") in [asked[:2] for asked in place.leader.asked]


# ---- jobs on this machine


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> list[RunningJob]:
    """The jobs of this machine, which a test may change."""
    jobs = [
        RunningJob(job="digits", pid=41, address="unix:/a"),
        RunningJob(job="words", pid=42, address="unix:/b"),
    ]
    monkeypatch.setattr(
        operator, "running_jobs", lambda job: [j for j in jobs if job in (None, j.job)]
    )
    monkeypatch.delenv("ELASTIC_ETCD", raising=False)
    return jobs


@pytest.mark.usefixtures("local")
def test_jobs_without_etcd_lists_those_that_run_on_this_machine() -> None:
    table = CliRunner().invoke(main.app, ["jobs"])
    assert [line.split() for line in table.output.splitlines()][-2:] == [
        ["digits", "41", "unix:/a"],
        ["words", "42", "unix:/b"],
    ]
    one = CliRunner().invoke(main.app, ["jobs", "--job", "words", "--output", "json"])
    assert json.loads(one.output) == [{"job": "words", "pid": 42, "coordinator": "unix:/b"}]


def test_jobs_without_etcd_and_without_local_ones_names_the_missing_setting(
    local: list[RunningJob],
) -> None:
    local.clear()
    result = CliRunner().invoke(main.app, ["jobs"])
    assert result.exit_code == ExitCode.CONFIGURATION
    assert "etcd is missing" in result.output
