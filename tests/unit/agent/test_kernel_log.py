"""What the kernel's log says of a kill is found by the process's number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent.out_of_memory import KernelLog

WORD = "Memory cgroup out of memory: Killed process 21562 (python) total-vm:2695508kB"


class Kernel:
    """A FIFO that gives a record with each read, as /dev/kmsg does."""

    def __init__(self, files: Path) -> None:
        self.path = files / "kmsg"
        os.mkfifo(self.path)
        self.log = KernelLog(self.path)
        self._end = os.open(self.path, os.O_WRONLY)

    def says(self, text: str) -> None:
        os.write(self._end, f"3,430,41595007115,-;{text}\n SUBSYSTEM=x\n".encode())

    def close(self) -> None:
        self.log.close()
        os.close(self._end)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    yield made
    made.close()


def test_the_line_about_a_process_is_found_once(kernel: Kernel) -> None:
    kernel.says(WORD)
    assert kernel.log.word_on(7, out_of_memory=False) == ""
    assert kernel.log.word_on(21562, out_of_memory=False) == WORD
    assert kernel.log.word_on(21562, out_of_memory=False) == ""


def test_in_a_container_the_only_kill_is_that_of_the_cgroup(kernel: Kernel) -> None:
    kernel.says(WORD)
    assert kernel.log.word_on(12, out_of_memory=True) == WORD


def test_of_several_kills_none_is_guessed(kernel: Kernel) -> None:
    kernel.says(WORD)
    kernel.log.word_on(7, out_of_memory=False)
    kernel.says(WORD.replace("21562", "9"))
    assert kernel.log.word_on(12, out_of_memory=True) == ""


def test_other_lines_are_no_word(kernel: Kernel) -> None:
    kernel.says("python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL)")
    assert kernel.log.word_on(21562, out_of_memory=True) == ""


def test_where_the_log_may_not_be_read_nothing_is_known(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "nothing")
    assert log.word_on(1, out_of_memory=True) == ""
    log.close()
