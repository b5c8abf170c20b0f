"""Reads the records of tests/chaos/scripts/float64_trainer.py from all hosts as they grow."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from tests.chaos.records import Record


class StepRecords:
    """The records so far; reads no line twice. All processes share the clock of the field `at`."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._offsets: dict[Path, int] = {}
        self._rows: dict[str, list[Record]] = defaultdict(list)

    def by_process(self) -> dict[str, list[Record]]:
        """The records of each process, oldest first."""
        for path in sorted(self._out.glob("steps-*.jsonl")):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                whole_lines = file.read().rpartition(b"\n")[0]
            if whole_lines:
                self._offsets[path] = offset + len(whole_lines) + 1
                self._rows[path.stem] += map(json.loads, whole_lines.splitlines())
        return self._rows

    def commits(self, *, since_s: float = 0.0, host: str | None = None) -> list[Record]:
        """The commits since `since_s`, of all processes or of those of a host, oldest first."""
        return sorted(
            (
                row
                for rows in self.by_process().values()
                for row in rows
                if row["kind"] == "commit" and row["at"] >= since_s and host in (None, row["host"])
            ),
            key=lambda row: float(row["at"]),
        )

    def newest(self) -> int:
        """The highest index of a committed step; -1 before the first."""
        last = [rows[-1]["step"] for rows in self._committed().values()]
        return max(last, default=-1)

    def generation(self) -> int:
        """The newest generation that has committed a step; -1 before the first."""
        return max((row["generation"] for row in self._newest_group().values()), default=-1)

    def at_work(self) -> set[str]:
        """The hosts whose processes have committed in the newest generation that has any."""
        return {row["host"] for row in self._newest_group().values()}

    def together(self) -> set[str]:
        """The processes that have committed in the newest generation that has any."""
        return set(self._newest_group())

    def repeated(self, since_s: float) -> list[Record]:
        """Attempts since `since_s` at steps that the same process had begun before."""
        again = []
        for rows in self.by_process().values():
            attempts = [row for row in rows if row["kind"] == "attempt"]
            seen: set[int] = set()
            for row in attempts:
                if row["step"] in seen and row["at"] >= since_s:
                    again.append(row)
                seen.add(row["step"])
        return again

    def _newest_group(self) -> dict[str, Record]:
        """The last commit of each process of the newest generation that has any."""
        last = {process: rows[-1] for process, rows in self._committed().items()}
        newest = max((row["generation"] for row in last.values()), default=-1)
        return {process: row for process, row in last.items() if row["generation"] == newest}

    def _committed(self) -> dict[str, list[Record]]:
        found = {
            process: [row for row in rows if row["kind"] == "commit"]
            for process, rows in self.by_process().items()
        }
        return {process: rows for process, rows in found.items() if rows}
