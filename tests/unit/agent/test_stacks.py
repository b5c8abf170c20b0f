"""An agent gets its workers' stacks from the workers themselves or by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent import worker_server
from elastic.agent.worker_server import StackCollector, main_stacks, with_place
from elastic.core.membership import Failure, FailureKind
from elastic.v1 import job_pb2
from elastic.v1 import stacks_pb2 as pb

PROGRAM = """
    import os, time
    from elastic.runtime.stack_file import write_stacks_on_signal

    def load():
        os.write(write, b".")
        time.sleep(600)

    write_stacks_on_signal()
    read, write = os.pipe()
    if os.fork() == 0:
        load()
    os.read(read, 1)
    def works():
        print("there", flush=True)
        time.sleep(600)
    works()
"""


@pytest.fixture
def worker() -> Iterator[int]:
    """The pid of a process that has a child and answers only to a signal."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    yield process.pid
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


class Node:
    """A stack collector whose workers all answer, or never do."""

    def __init__(self, *, answers: bool, **pids: int) -> None:
        self._answers = answers
        self.asked: list[str] = []
        self.collector = StackCollector(self._ask, pids)

    def _ask(self, worker: str, request: pb.StacksRequest) -> None:
        self.asked.append(worker)
        if self._answers:
            told = pb.WorkerStacks(worker=worker, request=request.request, answer=pb.ANSWER_GIVEN)
            told.processes.add(pid=7)
            self.collector.answered(worker, pb.WorkerStacks(worker=worker, request=99))
            self.collector.answered(worker, told)


def functions(process: pb.ProcessStacks) -> list[str]:
    return [frame.function for frame in process.threads[0].frames]


async def test_a_worker_that_answers_is_not_signalled_but_its_children_are(
    worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "_WRITE_S", 20.0)
    node = Node(answers=True, a=worker)
    collecting = node.collector.collect(["a"])
    assert node.asked == ["a"], "at once: before it is told what comes next"
    (told,) = await collecting
    assert told.answer == pb.ANSWER_GIVEN
    own, child = told.processes
    assert own.pid == 7
    assert functions(child)[0] == "load"


async def test_a_worker_that_does_not_answer_is_signalled(
    worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "_ANSWER_S", 0.01)
    monkeypatch.setattr(worker_server, "_WRITE_S", 20.0)
    node = Node(answers=False, a=worker)
    here = job_pb2.Progress(place=pb.PLACE_DATA, place_s=3.0, committed=7)
    node.collector.progressed("a", here)
    for dying in (False, True):
        (told,) = await node.collector.collect(["a"], dying=dying)
        assert told.answer == pb.ANSWER_SIGNALLED
        assert [functions(p)[0] for p in told.processes] == ["works", "load"]
        assert (told.place, told.committed) == (pb.PLACE_DATA, 7)
        assert told.place_s >= 3.0


async def test_a_stopped_worker_is_reported_at_once(
    worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "_ANSWER_S", 3600.0)
    os.kill(worker, signal.SIGSTOP)
    os.waitpid(worker, os.WUNTRACED)
    node = Node(answers=False, a=worker, b=0)
    node.collector.progressed("a", job_pb2.Progress(place=pb.PLACE_FORWARD))
    first, second = await node.collector.collect(["a", "b"])
    assert (first.answer, first.place) == (pb.ANSWER_STOPPED, pb.PLACE_FORWARD)
    assert second.answer == pb.ANSWER_NONE, "it is not forked yet"
    assert node.asked == []


def told(place: int, *frames: pb.Frame) -> pb.WorkerStacks:
    threads = [pb.ThreadStack(name="MainThread", frames=frames), pb.ThreadStack(name="other")]
    return pb.WorkerStacks(
        answer=pb.ANSWER_GIVEN,
        place=pb.Place.Name(place),
        place_s=34.0,
        processes=[pb.ProcessStacks(pid=7, name="train.py", threads=threads)],
    )


ENGINE = pb.Frame(file="/v/site-packages/torch/autograd/graph.py", line=9, function="_run")
GETITEM = pb.Frame(file="/job/data.py", line=41, function="__getitem__")
LATE = Failure(
    worker="a", kind=FailureKind.LEFT_OUT, signature="x", message="did not respond for 60 s"
)


def test_a_failure_says_where_the_script_hung() -> None:
    failed = with_place(LATE, told(pb.PLACE_DATA, GETITEM))
    assert failed.message == (
        "did not respond for 60 s: it is loading data, in `__getitem__`, data.py:41, for 34 s"
    )
    assert (failed.place, failed.signature) == ("/job/data.py:41", "hung at /job/data.py:41")


def test_a_worker_that_waits_for_others_has_no_place_at_which_it_hangs() -> None:
    failed = with_place(LATE, told(pb.PLACE_BACKWARD, ENGINE))
    assert "in the backward pass" in failed.message
    assert (failed.place, failed.signature) == ("", "x")


def test_a_place_that_the_coordinator_has_told_is_not_replaced() -> None:
    known = Failure(worker="a", kind=FailureKind.LEFT_OUT, message="hung 20 s in a.py:1", place="p")
    failed = with_place(known, told(pb.PLACE_DATA, GETITEM))
    assert (failed.message, failed.place) == ("hung 20 s in a.py:1", "p")
    assert failed.signature == "hung at p"


def test_a_failure_has_a_limited_number_of_lines_of_the_main_threads_stacks() -> None:
    stacked = told(pb.PLACE_DATA, *[GETITEM] * 60)
    lines = main_stacks(stacked).splitlines()
    assert lines[:3] == [
        "process 7: train.py",
        "  MainThread (most recent call first):",
        '    File "/job/data.py", line 41 in __getitem__',
    ]
    assert len(lines) == 40
    assert len(stacked.processes[0].threads) == 2


async def test_no_worker_is_signalled_for_stretches_of_time(worker: int) -> None:
    silent = Node(answers=False, w=worker)
    assert await silent.collector.collect(["w"], stretches=5) == []
    (told,) = await Node(answers=True, w=worker).collector.collect(["w"], stretches=5)
    assert len(told.processes) == 1, "its children are left alone"
