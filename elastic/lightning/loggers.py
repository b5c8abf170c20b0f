"""Loggers have one writer, rank 0, and write each row once, whoever that is after a loss."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

Row = tuple[Callable[..., Any], dict[str, Any], int | None]


class Rows:
    """What the Trainer's loggers are given. Rows of a step's block are written when it counts.

    Every worker keeps those of the last two steps: if rank 0 is lost before it has written them,
    the next rank 0 does. A logger skips what is there already, as the CSVLogger does here, or shows
    the same value again.
    """

    def __init__(self) -> None:
        self._held: list[Row] = []
        self._recent: list[tuple[int, Row]] = []
        self._committed = 0
        self._in_block = False

    def attach(self, trainer: Any) -> None:
        """Take what is given to the loggers of this Trainer, for another fit."""
        self._recent.clear()
        for logger in trainer.loggers:
            original = logger.log_metrics
            if not isinstance(original, functools.partial):
                logger.log_metrics = functools.partial(self._take, original)

    def begin(self, committed: int) -> None:
        """A step's block has begun, after so many committed steps."""
        self._in_block, self._committed = True, committed
        self._held.clear()
        self._recent = [(step, row) for step, row in self._recent if step >= committed - 1]

    def commit(self) -> None:
        """The block counts."""
        self._in_block = False
        held, self._held = self._held, []
        for row in held:
            self._write(row)

    def give_up(self) -> None:
        """The block does not count."""
        self._in_block = False
        self._held.clear()

    def write_again(self) -> None:
        """This worker has become rank 0: write what the one before may not have written."""
        for _, (write, metrics, step) in self._recent:
            write(metrics=metrics, step=step)

    def _take(
        self, write: Callable[..., Any], metrics: dict[str, Any], step: int | None = None
    ) -> None:
        row = write, dict(metrics), step
        if self._in_block:
            self._held.append(row)
        else:
            self._write(row)

    def _write(self, row: Row) -> None:
        self._recent.append((self._committed, row))
        write, metrics, step = row
        write(metrics=metrics, step=step)


def open_again(trainer: Any) -> None:
    """This worker is rank 0 now: let its CSVLoggers go on in the files that are there."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            logger._fs.makedirs(logger.root_dir, exist_ok=True)
            logger._experiment = _KeptRows(logger.log_dir)


class _KeptRows(ExperimentWriter):
    """Goes on in a file of earlier rows, which Lightning's own writer removes. A row of a step is
    skipped if the file has one of the same step with the same names."""

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        """Keep a row, for the next `save`."""
        super().log_metrics(metrics_dict, step)
        if _key(self.metrics[-1]) in self._known:
            self.metrics.pop()

    def _check_log_dir_exists(self) -> None:
        self._known: set[tuple[str, frozenset[str]]] = set()
        if not self._fs.isfile(self.metrics_file_path):
            return
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            text = file.read()
        whole = text[: text.rfind("\n") + 1]  # the last row, if its writer was killed in it, is not
        if whole != text:
            self._replace(whole)
        reader = csv.DictReader(whole.splitlines())
        self._known = {_key(row) for row in reader}
        self.metrics_keys = sorted(reader.fieldnames or ())

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            rows = list(csv.DictReader(file))
        with self._fs.open(f"{self.metrics_file_path}.new", "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=fieldnames)
            writer.writeheader()
            writer.writerows(rows)
        self._fs.mv(f"{self.metrics_file_path}.new", self.metrics_file_path)

    def _replace(self, text: str) -> None:
        with self._fs.open(f"{self.metrics_file_path}.new", "w", newline="") as file:
            file.write(text)
        self._fs.mv(f"{self.metrics_file_path}.new", self.metrics_file_path)


def _key(row: dict[str, Any]) -> tuple[str, frozenset[str]]:
    return str(row.get("step")), frozenset(k for k, v in row.items() if v not in (None, ""))
