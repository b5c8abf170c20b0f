"""A script that prints to a log on a full disk goes on."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from elastic.worker.process.zygote import LogStream, outlive_full_disk


def text_on(fd: int, told: list[str]) -> io.TextIOWrapper:
    log = LogStream(fd, told.append)
    return io.TextIOWrapper(io.BufferedWriter(log), encoding="utf-8", line_buffering=True)


def test_output_that_finds_no_space_is_lost_and_reported_once() -> None:
    told: list[str] = []
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        stream = text_on(full, told)
        for _ in range(3):
            print("a step", file=stream, flush=True)
        stream.detach()
    finally:
        os.close(full)
    assert told == ["No space left on device"]


def test_the_log_says_how_much_was_lost_once_there_is_space(tmp_path: Path) -> None:
    told: list[str] = []
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    full = os.open("/dev/full", os.O_WRONLY)
    place = os.dup(log)
    try:
        stream = text_on(place, told)
        print("before", file=stream)
        os.dup2(full, place)
        print("lost", file=stream)
        os.dup2(log, place)
        print("after", file=stream)
        stream.detach()
    finally:
        for fd in (log, full, place):
            os.close(fd)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["before", "", "[elastic: 5 bytes of output are lost here]", "after"]


def test_an_error_other_than_a_full_disk_is_raised_to_the_script() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    log = LogStream(writer, lambda _: None)
    with pytest.raises(BrokenPipeError) as caught:
        log.write(b"x")
    os.close(writer)
    assert caught.value.errno == errno.EPIPE


def test_stdout_and_stderr_are_written_line_by_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    outlive_full_disk(lambda _: None)
    print("out")
    print("error", file=sys.stderr)
    assert capfd.readouterr() == ("out\n", "error\n")
