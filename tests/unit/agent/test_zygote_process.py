"""A real zygote and its workers, under agents that end and may come back."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic.rpc.framing import encode
from elastic.runtime.orphans import is_cleaner, prctl
from elastic.v1 import local_pb2 as pb
from tests.job_process import descendants
from tests.waiting import eventually

DEADLINE_S = 90.0
PR_SET_CHILD_SUBREAPER = 36
OWNER = "tests.unit.agent.zygote_owner"
Start = Callable[..., "Owner"]


class Owner:
    """A process that has started or found the zygote of a directory."""

    def __init__(self, directory: Path, grace_s: float, before: Sequence[str] = ()) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", OWNER, str(directory), str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.how = self.hear()["event"]
        self.ready: dict[str, Any] = {}

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        print(*command, file=self.process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        """The next event; the test's own timeout ends the wait if none comes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it ended without a word"
        return dict(json.loads(line))

    def hear_of(self, event: str) -> dict[str, Any]:
        heard = self.hear()
        while heard["event"] != event:
            heard = self.hear()
        return heard

    def spawn(
        self, worker: str, seconds: float = 600.0, code: int = 0, detached: Path | None = None
    ) -> int:
        self.tell("spawn", worker, seconds, code, *([detached] if detached is not None else []))
        spawned = self.hear_of("spawned")
        assert spawned["worker"] == worker
        return int(spawned["pid"])

    def run(self, worker: str, script: str) -> int:
        """Spawn a worker that runs this text; return its pid."""
        path = self.directory / f"{worker}.py"
        path.write_text(script)
        self.tell("run", worker, path)
        return int(self.hear_of("spawned")["pid"])

    def told(self, worker: str) -> str:
        """What a worker has written so far."""
        try:
            return (self.directory / f"{worker}.log").read_text()
        except OSError:
            return ""

    def killed(self) -> None:
        """Kill the process, as an agent that ends without a word."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts owners of one directory, one after the other, and ends all that is left of them."""
    owners: list[Owner] = []
    keepers: set[int] = set()
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as directory:
        (Path(directory) / "job.json").touch()
        lock = (Path(directory) / "job.json").open()

        def start(grace_s: float, before: Sequence[str] = ()) -> Owner:
            owners.append(Owner(Path(directory), grace_s, before))
            owners[-1].ready = owners[-1].hear_of("ready")
            keepers.add(owners[-1].ready["keeper"])
            return owners[-1]

        yield start
        for owner in owners:
            owner.end()
        for keeper in keepers:
            if not is_gone(keeper):
                os.killpg(keeper, signal.SIGKILL)
        lock.close()


def is_gone(pid: int) -> bool:
    """True if the process has ended, even if nobody has reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


until = functools.partial(eventually, deadline_s=DEADLINE_S)


def test_a_second_agent_finds_the_firsts_workers_and_hears_of_missed_exits(start: Start) -> None:
    first = start(60.0)
    assert first.how == "started"
    assert first.ready["workers"] == {}
    living, dying = first.spawn("w1"), first.spawn("w2", seconds=600.0)
    first.killed()
    os.kill(dying, signal.SIGKILL)
    until(lambda: is_gone(dying))
    second = start(60.0)
    assert second.how == "found"
    assert second.ready["keeper"] == first.ready["keeper"]
    (worker,) = second.ready["workers"]
    pid, log = second.ready["workers"][worker]
    assert (worker, pid) == ("w1", living)
    assert log.endswith("/w1.log")
    assert second.hear() == {"event": "exited", "worker": "w2", "code": 0, "signal": 9}
    third = second.spawn("w3", seconds=0.0, code=3)
    assert second.hear() == {"event": "exited", "worker": "w3", "code": 3, "signal": 0}
    assert is_gone(third)
    second.tell("kill", "w1", int(signal.SIGKILL))
    assert second.hear()["worker"] == "w1"
    second.tell("close")
    assert second.hear() == {"event": "closed"}
    assert is_gone(second.ready["keeper"])


NOISE = {
    "bytes": b"\xff" * 1000,
    "half a message": (100).to_bytes(4, "big"),
    "no message": (3).to_bytes(4, "big") + b"abc",
    "another request": encode(pb.ZygoteRequest(end=pb.EndRequest())),
}


@pytest.mark.long
def test_strangers_do_not_take_the_agents_place(start: Start) -> None:
    owner = start(60.0)
    worker = owner.spawn("w1")
    with contextlib.ExitStack() as stack:
        for noise in (b"", *NOISE.values()) * 10:
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
            stranger.connect(str(owner.directory / "zygote.sock"))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(noise)
        owner.spawn("w2")
    owner.spawn("w3")
    assert not is_gone(worker)


def test_without_grace_workers_and_keeper_end_with_the_agent(start: Start) -> None:
    owner = start(0.0)
    worker = owner.spawn("w1")
    owner.killed()
    until(lambda: is_gone(worker) and is_gone(owner.ready["keeper"]))


def test_a_connection_that_breaks_costs_no_worker_and_no_request(start: Start) -> None:
    """This holds without grace, too: grace is only for agents that have ended."""
    owner = start(0.0)
    first = owner.spawn("w1")
    owner.tell("break")
    second = owner.spawn("w2")
    owner.tell("break")
    owner.tell("kill", "w1", int(signal.SIGKILL))
    assert owner.hear() == {"event": "exited", "worker": "w1", "code": 0, "signal": 9}
    assert is_gone(first)
    assert not is_gone(second)
    owner.killed()
    until(lambda: is_gone(second) and is_gone(owner.ready["keeper"]))


@pytest.mark.long
def test_the_workers_end_when_the_grace_is_over(start: Start) -> None:
    owner = start(3.0)
    worker = owner.spawn("w1")
    began = time.monotonic()
    owner.killed()
    until(lambda: is_gone(worker) and is_gone(owner.ready["keeper"]))
    assert time.monotonic() - began >= 2.9


def test_workers_live_on_when_an_agent_lets_go_and_end_when_it_closes(start: Start) -> None:
    first = start(60.0)
    worker = first.spawn("w1")
    first.tell("let_go")
    first.process.wait()
    assert not is_gone(worker)
    second = start(60.0)
    assert list(second.ready["workers"]) == ["w1"]
    second.tell("close")
    assert second.hear() == {"event": "closed"}
    assert is_gone(worker)
    assert is_gone(second.ready["keeper"])


def test_a_zygote_that_is_killed_is_lost_with_its_workers(start: Start) -> None:
    first = start(60.0)
    worker = first.spawn("w1")
    first.killed()
    second = start(60.0)
    keeper = second.ready["keeper"]
    os.killpg(keeper, signal.SIGKILL)  # keeper and zygote
    lost = second.hear_of("lost")
    assert "zygote.log" in lost["reason"]
    until(lambda: is_gone(worker))


def detaching(owner: Owner) -> int:
    """Let a worker of this owner start and detach a process; return that process's pid."""
    file = owner.directory / "detached"
    owner.spawn("w9", detached=file)
    until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


def test_detached_processes_end_with_a_zygote_that_was_found(start: Start) -> None:
    first = start(60.0)
    detached = detaching(first)
    first.killed()
    second = start(60.0)
    assert not is_gone(detached)
    os.killpg(second.ready["keeper"], signal.SIGKILL)
    second.hear_of("lost")
    assert is_gone(detached)


@pytest.mark.long
def test_the_next_agent_ends_detached_processes_if_all_were_killed_at_once(start: Start) -> None:
    first = start(60.0)
    detached = detaching(first)
    keeper = first.ready["keeper"]
    group = [keeper, *map(int, Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())]
    first.process.send_signal(signal.SIGSTOP)
    os.killpg(keeper, signal.SIGSTOP)
    os.killpg(keeper, signal.SIGKILL)
    until(lambda: all(map(is_gone, group)))  # else the second could still connect to the zygote
    first.killed()
    assert not is_gone(detached)
    second = start(60.0)
    assert second.how == "started"
    assert is_gone(detached)


SHARES_MEMORY = """
import multiprocessing, sys, time
from multiprocessing import shared_memory
import torch.multiprocessing
torch.multiprocessing.set_sharing_strategy("file_system")

def hold(*tensors):
    time.sleep(600)

segment = shared_memory.SharedMemory(create=True, size=1000)
lock = multiprocessing.get_context("spawn").Lock()
tensor = torch.ones(1000).share_memory_()
child = multiprocessing.get_context("fork").Process(target=hold)
child.start()
torches = [line.split("/dev/shm/")[1].split()[0]
           for line in open("/proc/self/maps") if "shm/torch_" in line]
print(child.pid, segment.name, lock._semlock.name[1:], *torches, flush=True)
time.sleep(600)
"""


class NamedMemory:
    """A worker that shares memory with a child."""

    def __init__(self, owner: Owner, worker: str) -> None:
        self.name = worker
        self.worker = owner.run(worker, SHARES_MEMORY)
        until(lambda: owner.told(worker).endswith("\n"))
        child, *names = owner.told(worker).split()
        self.child = int(child)
        found = [Path("/dev/shm") / name for name in names]
        self.files = [f if f.exists() else f.with_name(f"sem.{f.name}") for f in found]
        assert len(found) == 3
        assert all(file.exists() for file in self.files), self.files

    def is_removed(self) -> bool:
        gone = is_gone(self.worker) and is_gone(self.child)
        return gone and not any(file.exists() for file in self.files)


def test_named_memory_of_ended_workers_is_removed(start: Start) -> None:
    """multiprocessing's resource tracker and torch_shm_manager do it, once all users are gone."""
    owner = start(60.0)
    killed, ended, living = workers = [NamedMemory(owner, name) for name in ("w1", "w2", "w3")]
    try:
        os.kill(killed.worker, signal.SIGKILL)
        owner.tell("kill", ended.name, int(signal.SIGKILL))
        until(lambda: killed.is_removed() and ended.is_removed())
        assert not is_gone(living.worker)
        owner.tell("close")
        owner.hear_of("closed")
        assert living.is_removed()
    finally:
        for worker in workers:
            for file in worker.files:
                file.unlink(missing_ok=True)


FLOODS = """
import os
os.write(1, b"x" * 20_000_000)
print("last words")
raise SystemExit(3)
"""


@pytest.mark.long
def test_a_log_whose_disk_hangs_holds_up_no_worker_and_no_end(start: Start) -> None:
    owner = start(60.0)
    log = owner.directory / "w1.log"
    os.mkfifo(log)  # to open it waits for a reader
    (owner.directory / "w1.py").write_text(FLOODS)
    owner.tell("run", "w1", owner.directory / "w1.py")
    output = owner.hear_of("spawned")["output"]
    assert owner.hear_of("exited")["code"] == 3
    newest = Path(f"/proc/{owner.process.pid}/fd/{output}").read_bytes()[-13:]
    assert newest == b"xxlast words\n"
    assert owner.hear_of("output_lost")["worker"] == "w1"
    log.unlink()
    owner.tell("close")
    owner.hear_of("closed")


def test_a_log_is_written_on_after_its_writer_was_killed_and_to_the_end(start: Start) -> None:
    owner = start(60.0)
    worker = owner.run("w1", "import time\nprint('first', flush=True)\ntime.sleep(600)\n")
    until(lambda: owner.told("w1") == "first\n")
    (writer,) = filter(is_cleaner, descendants(owner.ready["keeper"]))
    os.kill(writer, signal.SIGKILL)
    with open(f"/proc/{worker}/fd/1", "a") as output:
        output.write("then\n")
    until(lambda: owner.told("w1") == "first\nthen\n")
    with open(f"/proc/{worker}/fd/1", "a") as output:
        output.write("last words\n")
    with (owner.directory / "w1.log").open() as log:  # the directory is removed
        owner.tell("close")
        owner.hear_of("closed")
        assert log.read() == "first\nthen\nlast words\n"


LEAVES_ORPHANS = """
import os, subprocess, time
later = subprocess.Popen(["sh", "-c", "exit 5"])
codes = set()
for _ in range(30):
    codes.add(subprocess.run(["sh", "-c", "true & exit 3"]).returncode)
    codes.add(os.waitstatus_to_exitcode(os.system("true & exit 4")))
time.sleep(1.5)
print(sorted(codes), later.wait(), flush=True)
time.sleep(600)
"""


def test_orphans_of_a_worker_are_reaped_and_its_own_children_are_not(start: Start) -> None:
    owner = start(60.0)
    worker = owner.run("w1", LEAVES_ORPHANS)
    until(lambda: owner.told("w1").endswith("\n"))
    assert owner.told("w1") == "[3, 4] 5\n"
    family = [owner.ready["keeper"], *descendants(owner.ready["keeper"])]
    assert worker in family
    until(lambda: not [pid for pid in descendants(family[0]) if is_gone(pid)])


LONG_FREEZE = """
import gc, sys, time
freeze, monotonic = gc.freeze, time.monotonic
def freeze_for_a_minute():
    freeze()
    time.monotonic = lambda: monotonic() + 60.0
command = str(sys.orig_argv)
if "process.zygote" in command and "runtime.keeper" not in command:
    gc.freeze = freeze_for_a_minute
"""


@pytest.mark.long
@pytest.mark.parametrize("grace_s", [0.0, 20.0])
def test_a_zygote_that_takes_long_to_listen_serves_the_agent_that_has_started_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    """On a busy machine it may be held up for longer than it waits for agents."""
    (tmp_path / "sitecustomize.py").write_text(LONG_FREEZE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    owner = start(grace_s)
    owner.spawn("w1")
    owner.tell("close")
    owner.hear_of("closed")


NO_FORKS = """
import errno, os, sys
fork = os.fork
def fork_or_not():
    if os.path.exists(os.environ["NO_FORKS"]):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
if "zygote" in str(sys.orig_argv):
    os.fork = fork_or_not
"""


def test_a_fork_that_fails_is_reported_and_costs_no_living_worker(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses a fork where pids.max is reached; root has no other limit to reach."""
    (tmp_path / "sitecustomize.py").write_text(NO_FORKS)
    none = tmp_path / "no-forks"
    monkeypatch.setenv("NO_FORKS", str(none))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    owner = start(60.0)
    living = owner.spawn("w1")
    none.touch()
    owner.tell("spawn", "w2", 600.0, 0)
    failed = owner.hear_of("not_spawned")
    assert (failed["worker"], failed["reason"]) == ("w2", os.strerror(errno.EAGAIN))
    none.unlink()
    owner.spawn("w3")
    assert not is_gone(living)
    owner.tell("close")
    owner.hear_of("closed")


def test_callers_without_a_free_descriptor_cost_no_worker_and_no_event(start: Start) -> None:
    owner = start(60.0)
    living = owner.spawn("w1")
    zygote = int(Path(f"/proc/{living}/stat").read_text().rpartition(")")[2].split()[1])
    used = max(int(fd) for fd in os.listdir(f"/proc/{zygote}/fd")) + 1
    before = resource.prlimit(zygote, resource.RLIMIT_NOFILE)
    resource.prlimit(zygote, resource.RLIMIT_NOFILE, (used, before[1]))
    callers = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    for caller in callers:
        caller.connect(str(owner.directory / "zygote.sock"))
    os.kill(living, signal.SIGKILL)
    assert owner.hear_of("exited")["worker"] == "w1"
    for caller in callers:
        caller.close()
    resource.prlimit(zygote, resource.RLIMIT_NOFILE, before)
    owner.spawn("w2")
    owner.tell("close")
    owner.hear_of("closed")


def test_a_lost_zygote_costs_no_process_outside_the_run(start: Start) -> None:
    """After `helper & exec elastic agent ...` the helper is a child of the agent."""
    owner = start(60.0, ["sh", "-c", 'sleep 1000 & exec "$@"', "sh"])
    (helper,) = [p for p in children_of(owner.process.pid) if p != owner.ready["keeper"]]
    worker = owner.spawn("w1")
    os.killpg(owner.ready["keeper"], signal.SIGKILL)
    owner.hear_of("lost")
    assert is_gone(worker)
    assert not is_gone(helper)
    os.kill(helper, signal.SIGKILL)


@pytest.mark.long
def test_a_keeper_that_nobody_reaps_counts_as_ended(start: Start) -> None:
    """This happens where the first process of a container reaps no orphans."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # for this process, which reaps only children that it knows
    try:
        first = start(60.0)
        keeper = first.ready["keeper"]
        first.killed()
        second = start(60.0)
        assert second.how == "found"
        second.tell("close")
        second.hear_of("closed")
        assert Path(f"/proc/{keeper}").exists()
        os.waitpid(keeper, 0)
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
