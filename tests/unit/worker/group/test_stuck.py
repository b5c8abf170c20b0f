"""A process whose thread gloo never wakes is given up; one whose script is slow is not."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import struct
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastic.worker.compilation import COMPILATIONS
from elastic.worker.group import stuck
from elastic.worker.group.process_group import Group
from elastic.worker.group.stuck import watch_script
from tests.unit.worker.together import Seat, run_together

HUGE = 2**28  # bytes: more than the kernel buffers
STUCK_S = 0.6


def given_up(meanwhile: Callable[[], object], left: Callable[[], bool] = lambda: False) -> bool:
    """Return whether `watch_script` gives this thread up while it runs `meanwhile`."""
    ended, calls = threading.Event(), list[float]()
    watch = threading.Thread(
        target=watch_script,
        args=(lambda: left() or ended.is_set(), calls.append, STUCK_S),
    )
    watch.start()
    meanwhile()
    ended.set()
    watch.join()
    assert not calls or calls[0] >= 0.5, calls
    return bool(calls)


def compute(for_s: float) -> None:
    """Compute in torch for `for_s` seconds, soon in calls that take 0.1 s or more."""
    size, ends_at = 400, time.monotonic() + for_s
    while time.monotonic() < ends_at:
        began = time.monotonic()
        torch.nn.functional.linear(torch.ones(size, size), torch.ones(size, size))
        size = size * 2 if time.monotonic() - began < 0.1 else size


def wait_in_torch() -> None:
    released = torch.futures.Future[None]()
    threading.Timer(3 * STUCK_S, released.set_result, [None]).start()
    released.wait()


@pytest.mark.parametrize(
    "meanwhile", [lambda: time.sleep(3 * STUCK_S), lambda: compute(3 * STUCK_S)]
)
def test_a_slow_script_is_not_given_up(meanwhile: Callable[[], object]) -> None:
    assert not given_up(meanwhile)


def test_a_thread_that_waits_in_torch_for_a_compiler_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert given_up(wait_in_torch)
    monkeypatch.setattr(COMPILATIONS, "under_way", True)
    assert not given_up(wait_in_torch)


def test_a_thread_that_waits_for_a_processor_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy machine may let it wait for longer than gloo needs to wake it."""
    assert given_up(wait_in_torch)
    monkeypatch.setattr(stuck, "main_thread_times", lambda: ("R", 7))
    assert not given_up(wait_in_torch)


def test_a_thread_is_not_certainly_stuck_before_the_connections_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine it takes a second to find them, and only then can gloo wake the thread."""
    loops = iter(range(0, 10**6, stuck._SURE_LOOPS))
    monkeypatch.setattr(stuck, "_gloo", lambda: (next(loops), frozenset()))
    monkeypatch.setattr(stuck, "_waits_for_collective", lambda: True)
    began, cut_s, calls = time.monotonic(), 1.5, list[float]()

    def is_cut() -> bool:
        return time.monotonic() - began >= cut_s

    watch = threading.Thread(
        target=lambda: watch_script(
            lambda: False, lambda _: calls.append(time.monotonic() - began), 600.0, is_cut=is_cut
        )
    )
    watch.start()
    released = torch.futures.Future[None]()
    threading.Timer(4.0, released.set_result, [None]).start()
    released.wait()
    watch.join()
    assert cut_s + 0.4 <= calls[0] < 4.0


def test_a_thread_that_has_left_the_group_is_not_given_up() -> None:
    assert not given_up(lambda: time.sleep(3 * STUCK_S), left=lambda: True)


def wait_until_it_stands(group: Group, peer: int) -> None:
    """Wait until the peer is stopped and the buffers to it have been full for 0.5 s: then the
    sending thread waits in the middle of an operation."""
    unsent, stands_since = 0, math.inf
    while time.monotonic() - stands_since < 0.5:
        now_unsent = sum(_unsent(descriptor) for descriptor in group.descriptors())
        state = Path(f"/proc/{peer}/stat").read_text().rpartition(") ")[2][0]
        if state != "T" or now_unsent == 0 or now_unsent != unsent:
            unsent, stands_since = now_unsent, time.monotonic()
        time.sleep(0.02)


def _unsent(descriptor: int) -> int:
    """Return the number of bytes that the peer's kernel has not taken."""
    return struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0" * 4))[0]


@pytest.mark.parametrize("patience_s", [STUCK_S, 600.0], ids=["in the end", "once it is certain"])
def test_a_thread_that_gloo_does_not_wake_is_given_up(patience_s: float) -> None:
    if patience_s > STUCK_S and torch.__version__ < "2.13":
        pytest.skip("this torch does not name gloo's threads: only patience tells")

    def block(seat: Seat) -> None:
        group, pids = seat.join(), seat.exchange(os.getpid())
        given_up = threading.Event()

        def give_up(stood_s: float) -> None:
            assert 0.5 <= stood_s <= patience_s + 1.0
            given_up.set()
            os.kill(pids[1], signal.SIGKILL)  # this wakes the thread after all
            os._exit(0)

        def abort() -> None:
            group.abort()
            watch_script(lambda: False, give_up, patience_s)

        threading.Thread(target=lambda: (wait_until_it_stands(group, pids[1]), abort())).start()
        try:
            dist.send(torch.zeros(HUGE, dtype=torch.uint8), 1)
        except RuntimeError:
            if given_up.is_set():
                threading.Event().wait()
            raise
        raise AssertionError("gloo has woken it: worker/group/stuck.py can go")

    def stop_in_the_middle(seat: Seat) -> None:
        seat.join()
        seat.exchange(os.getpid())
        dist.irecv(torch.empty(HUGE, dtype=torch.uint8), 0)
        os.kill(os.getpid(), signal.SIGSTOP)

    run_together(block, stop_in_the_middle)


def test_groups_of_the_script_are_named_if_a_process_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stuck, "GROUPS", {"ours": 0})
    assert stuck.words(0.52) == "hung for 0.5 s in a lost group"
    monkeypatch.setattr(stuck, "GROUPS", {"ours": 0, "the script's": 0})
    assert "hung for 3.0 s in a lost group; the script has groups of its own" in stuck.words(3.0)
