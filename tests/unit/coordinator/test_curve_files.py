"""The curve has each committed step once, in files for people and for TensorBoard."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.record_writer import RecordWriter

from elastic.coordinator.step_recorder import CurveFiles
from elastic.errors import ConfigurationError, TransientError
from elastic.v1.job_pb2 import CurvePoint


def point(step: int, generation: int = 1, run: str = "i", **values: float) -> CurvePoint:
    values = values or {"loss": step / 2}
    return CurvePoint(step=step, generation=generation, run=run, unix_s=step + 0.25, values=values)


def points(first: int, last: int, generation: int = 1, **named: Any) -> list[CurvePoint]:
    return [point(step, generation, **named) for step in range(first, last + 1)]


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_in(path: Path) -> list[int]:
    return [line["step"] for line in written(path)]


_OPEN: list[CurveFiles] = []


@pytest.fixture(autouse=True)
def closed_again() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


def opened(path: Path, *, run: str = "i") -> CurveFiles:
    files = CurveFiles(path, None, incarnation=run)
    files.open()
    _OPEN.append(files)
    return files


def test_a_line_has_the_step_its_time_and_its_values(tmp_path: Path) -> None:
    files = opened(path := tmp_path / "curve.jsonl")
    stored = files.append([point(3, 2, loss=0.5, accuracy=math.nan)])
    assert written(path) == [
        {
            "step": 3,
            "generation": 2,
            "unix_s": 3.25,
            "values": {"accuracy": None, "loss": 0.5},
        }
    ]
    assert (stored.committed, stored.run, stored.generation) == (4, "i", 2)


def test_steps_that_are_reported_again_are_not_written_again(tmp_path: Path) -> None:
    files = opened(path := tmp_path / "curve.jsonl")
    files.append(points(0, 4))
    files.append(points(2, 6))
    files.append(points(5, 7, 2))  # a later generation, whose members cannot know what is stored
    assert steps_in(path) == list(range(8))
    assert [line["generation"] for line in written(path)] == [1] * 5 + [2] * 3


def test_recomputed_steps_replace_those_that_were_given_up(tmp_path: Path) -> None:
    files = opened(path := tmp_path / "curve.jsonl")
    files.append(points(0, 9))
    files.append([*points(6, 7, 3, loss=8.0), *points(9, 9, 1)])
    assert steps_in(path) == list(range(8))
    assert [line["values"]["loss"] for line in written(path)][5:] == [2.5, 8.0, 8.0]


def test_a_run_that_resumes_from_a_checkpoint_continues_the_file(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    first = opened(path)
    first.append(points(0, 9))
    first.close()
    with path.open("a") as torn:
        torn.write('{"step": 10, "gen')
    opened(path, run="j").append(points(8, 11, run="j"))
    assert steps_in(path) == list(range(12))


def test_a_run_that_begins_at_step_0_moves_the_earlier_curve_aside(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    for run in ("i", "j", "k"):
        files = opened(path, run=run)
        files.append(points(0, 2, run=run))
        files.close()
    assert [len(p.read_text().splitlines()) for p in sorted(tmp_path.iterdir())] == [4, 4, 4]


def test_a_curve_that_another_run_writes_is_left_alone_until_that_ends(tmp_path: Path) -> None:
    first = opened(path := tmp_path / "curve.jsonl")
    first.append(points(0, 9))
    with pytest.raises(TransientError, match=r"curve.jsonl is being written by another.*--curve"):
        CurveFiles(path, None, incarnation="j", alone=True).open()
    second = CurveFiles(path, None, incarnation="j")
    _OPEN.append(second)
    with pytest.raises(OSError, match="another run"):
        second.open()
    with pytest.raises(OSError, match="another run"):
        second.append(points(5, 6, run="j"))
    first.append(points(10, 10))
    assert steps_in(path) == list(range(11))
    first.close()
    second.append(points(5, 6, run="j"))
    assert steps_in(path) == list(range(7))


def test_a_curve_moved_aside_is_not_written_by_another_run(tmp_path: Path) -> None:
    first = opened(path := tmp_path / "curve.jsonl")
    first.append(points(0, 2, run="i"))
    first.append(points(0, 1, 2, run="i"))  # moves the first steps aside
    assert len([*tmp_path.iterdir()]) == 2
    with pytest.raises(OSError, match="another run"):
        opened(path, run="j")
    opened(tmp_path / "curve.jsonl.1", run="j")


def test_the_next_leader_writes_though_the_one_before_has_not_closed_the_curve(
    tmp_path: Path,
) -> None:
    opened(path := tmp_path / "curve.jsonl").append(points(0, 4))
    opened(path).append(points(3, 6, 2))
    assert steps_in(path) == list(range(7))


def silent(first: int, last: int, **named: Any) -> list[CurvePoint]:
    """Steps for which the script has reported nothing."""
    return [
        CurvePoint(step=n, **{"generation": 1, "run": "i", **named}) for n in range(first, last + 1)
    ]


def test_a_run_that_reports_rarely_keeps_no_line_of_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    files = opened(path)
    files.append(points(0, 9))
    files.close()
    opened(path, run="j").append([*silent(0, 3, run="j"), point(4, run="j")])
    assert steps_in(path) == [4]
    assert steps_in(tmp_path / "curve.jsonl.1") == list(range(10))


def test_a_recomputed_step_that_reports_nothing_has_no_line(tmp_path: Path) -> None:
    files = opened(path := tmp_path / "curve.jsonl")
    files.append(points(0, 9))
    stored = files.append([*silent(6, 7, generation=3), point(8, 3), *silent(9, 9, generation=3)])
    assert steps_in(path) == [*range(6), 8]
    assert (stored.committed, stored.generation) == (10, 3)


def test_a_csv_curve_has_a_row_for_each_value(tmp_path: Path) -> None:
    files = opened(path := tmp_path / "curve.csv")
    files.append([point(0, loss=0.5, **{"a,b": math.inf})])
    files.append([point(1), point(2)])
    files.append([point(2, 2, loss=7.0)])
    assert path.read_text().splitlines() == [
        "step,generation,unix_s,name,value",
        '0,1,0.25,"a,b",inf',
        "0,1,0.25,loss,0.5",
        "1,1,1.25,loss,0.5",
        "2,2,2.25,loss,7.0",
    ]


@pytest.mark.parametrize("name", ["curve.csv", "curve.jsonl"])
def test_a_file_that_is_no_curve_is_refused_and_not_changed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("import torch\n")
    with pytest.raises(
        ConfigurationError, match=r"is not a curve file: it begins with b'import torch"
    ):
        opened(path)
    assert path.read_text() == "import torch\n"


def test_a_curve_file_that_cannot_be_created_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write the curve .*--curve"):
        opened(tmp_path / "nowhere" / "curve.jsonl")
    with pytest.raises(ConfigurationError, match=r"cannot write the curve .*--curve"):
        opened(tmp_path / ("x" * 300))  # a name too long even to ask whether it exists


@pytest.mark.timeout(20)
def test_a_curve_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/full")):
        with pytest.raises(ConfigurationError, match="is not a regular file"):
            opened(path)


def test_a_batch_that_was_written_in_part_is_removed_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = opened(path := tmp_path / "curve.jsonl")
    files.append(points(0, 1))
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if len(data) > 100:
            return write(descriptor, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.append(points(2, 5))
    monkeypatch.undo()
    assert steps_in(path) == [0, 1]
    files.append(points(2, 5))
    assert steps_in(path) == list(range(6))


def read(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The values of each tag as TensorBoard reads them."""
    reader = EventAccumulator(str(directory))
    reader.Reload()
    return {
        tag: [(s.step, s.value) for s in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


def test_tensorboard_reads_each_step_once(tmp_path: Path) -> None:
    files = CurveFiles(None, tmp_path / "board", incarnation="i")
    files.open()
    files.append(points(0, 9))
    files.append(points(5, 9))
    files.append(points(8, 11, 4, loss=7.0))
    files.close()
    losses = [(step, step / 2) for step in range(8)] + [(step, 7.0) for step in range(8, 12)]
    assert read(tmp_path / "board") == {"loss": losses}


def test_tensorboard_reads_each_step_once_after_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CurveFiles(None, tmp_path / "board", incarnation="i")
    files.open()
    files.append(points(0, 4))
    flush, failed = RecordWriter.flush, [OSError(errno.ENOSPC, "No space left")]

    def written_and_full(writer: RecordWriter) -> None:
        flush(writer)
        if failed:
            raise failed.pop()

    monkeypatch.setattr(RecordWriter, "flush", written_and_full)
    with pytest.raises(OSError, match="No space"):
        files.append(points(5, 9))
    monkeypatch.undo()
    later = time.time() + 1.0
    monkeypatch.setattr(time, "time", lambda: later)  # event files are named by the time
    files.append(points(5, 11))
    files.close()
    assert read(tmp_path / "board") == {"loss": [(step, step / 2) for step in range(12)]}


def test_removed_files_are_created_again(tmp_path: Path) -> None:
    curve, board = tmp_path / "curve.jsonl", tmp_path / "board"
    files = CurveFiles(curve, board, incarnation="i")
    _OPEN.append(files)
    files.open()
    files.append(points(0, 4))
    curve.unlink()
    shutil.rmtree(board)
    files.append(points(5, 6))
    assert steps_in(curve) == [5, 6]
    assert read(board) == {"loss": [(5, 2.5), (6, 3.0)]}
    curve.unlink()
    files.append([point(6, 3, loss=8.0)])
    assert steps_in(curve) == [6]


@pytest.mark.parametrize("again", [False, True], ids=["moved", "another in its place"])
def test_a_curve_that_was_rotated_continues_at_its_path(tmp_path: Path, again: bool) -> None:
    curve = tmp_path / "curve.jsonl"
    files = CurveFiles(curve, None, incarnation="i")
    _OPEN.append(files)
    files.open()
    files.append(points(0, 9))
    curve.rename(tmp_path / "curve.old")
    if again:
        curve.touch()
    files.append([point(step, 3, loss=8.0) for step in (5, 6)])
    assert steps_in(curve) == [5, 6]
    files.append([point(step, 4, loss=8.0) for step in (6, 7)])
    assert steps_in(curve) == [5, 6, 7]


def test_both_files_catch_up_after_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = CurveFiles(tmp_path / "curve.jsonl", tmp_path / "board", incarnation="i")
    files.open()
    files.append(points(0, 1))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.append(points(2, 3))
    monkeypatch.undo()
    files.append(points(2, 4))
    files.close()
    assert steps_in(tmp_path / "curve.jsonl") == list(range(5))
    assert read(tmp_path / "board") == {"loss": [(step, step / 2) for step in range(5)]}


def test_a_missing_tensorboardx_is_an_error_that_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'elastic-ddp\[tensorboard\]'"):
        CurveFiles(None, tmp_path, incarnation="i")


@pytest.mark.parametrize("line", ['{"step": 1e999}', "[" * 100_000, '{"step": []}', "9" * 5000])
def test_a_curve_with_a_line_that_is_none_is_continued(tmp_path: Path, line: str) -> None:
    path = tmp_path / "curve.jsonl"
    path.write_text(f'{{"step": 1, "generation": 1, "values": {{}}}}\n{line}\n')
    files = opened(path)
    files.append(points(2, 3))
    assert [json.loads(found)["step"] for found in path.read_text().splitlines()[-2:]] == [2, 3]
