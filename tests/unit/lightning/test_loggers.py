"""The log of a job has each row once, whoever wrote it."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from elastic.lightning.loggers import Rows, open_again

pytestmark = pytest.mark.filterwarnings("ignore")


def rank_0(directory: Path) -> tuple[CSVLogger, Rows]:
    """A worker that has become rank 0, with an empty memory."""
    logger = CSVLogger(directory, name="", version=0)
    trainer: Any = SimpleNamespace(loggers=[logger])
    rows = Rows()
    rows.attach(trainer)
    open_again(trainer)
    return logger, rows


def log(logger: CSVLogger, step: int, **values: float) -> None:
    logger.log_metrics(values, step)
    logger.save()


def written(directory: Path) -> list[dict[str, str]]:
    with (directory / "version_0" / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_the_next_rank_0_adds_what_is_missing_and_repeats_nothing(tmp_path: Path) -> None:
    first, _ = rank_0(tmp_path)
    for step in range(3):
        log(first, step, loss=1.0 + step)
    second, _ = rank_0(tmp_path)
    for step in range(1, 5):
        log(second, step, loss=9.0 + step)
    log(second, 4, held=0.5)
    third, _ = rank_0(tmp_path)
    log(third, 4, held=0.7)
    assert [(row["step"], row.get("loss"), row.get("held")) for row in written(tmp_path)] == [
        ("0", "1.0", None),
        ("1", "2.0", None),
        ("2", "3.0", None),
        ("3", "12.0", None),
        ("4", "13.0", None),
        ("4", None, "0.5"),
    ]


def test_half_a_row_of_a_writer_that_was_killed_is_written_again(tmp_path: Path) -> None:
    first, _ = rank_0(tmp_path)
    log(first, 0, loss=1.0)
    log(first, 1, loss=2.0)
    path = tmp_path / "version_0" / "metrics.csv"
    path.write_text(path.read_text()[:-4])
    second, _ = rank_0(tmp_path)
    log(second, 1, loss=2.0)
    assert [(row["step"], row["loss"]) for row in written(tmp_path)] == [("0", "1.0"), ("1", "2.0")]


def test_rows_of_a_block_wait_until_it_counts(tmp_path: Path) -> None:
    logger, rows = rank_0(tmp_path)
    rows.begin(0)
    log(logger, 0, rate=0.1)
    rows.give_up()
    rows.begin(0)
    log(logger, 0, rate=0.2)
    assert not (tmp_path / "version_0" / "metrics.csv").exists()
    rows.commit()
    logger.save()
    assert [row["rate"] for row in written(tmp_path)] == ["0.2"]


def test_a_worker_remembers_the_rows_of_two_steps(tmp_path: Path) -> None:
    logger, rows = rank_0(tmp_path)
    for step in range(4):
        rows.begin(step)
        rows.commit()
        log(logger, step, loss=0.0)
    path = tmp_path / "version_0" / "metrics.csv"
    path.unlink()
    logger.experiment.metrics_keys.clear()
    rows.write_again()
    logger.save()
    assert [row["step"] for row in written(tmp_path)] == ["2", "3"]
