"""Reads samples of large JSONL and Parquet files by their number, not what is before them."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import operator
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from torch.utils import data as torch_data

from elastic.errors import ConfigurationError, refusal_of

Offsets: TypeAlias = "npt.NDArray[np.int64]"

_JSONL, _PARQUET = (".jsonl", ".ndjson"), (".parquet",)
_CHUNK_BYTES = 16 << 20
_NEWLINE, _SPACE = 10, 32


class Indexed(torch_data.Dataset[Any]):
    """A map-style dataset over the lines of JSONL files (`.jsonl`, `.ndjson`) and the rows of
    Parquet files (`.parquet`, with pyarrow), in the order of the files. Any sample is read
    directly, so a job goes on anywhere in the data at once, and memory does not grow with the data.

    files: a path, or several. All workers must give the same ones, in the same order.
    columns: those of Parquet rows to read; None: all.
    cache_dir: where the place of each line is kept (8 bytes a line), for the next start and for the
    other processes of this machine, which share its memory. By default `elastic` in XDG_CACHE_HOME
    or ~/.cache. If that cannot be written, each process keeps them in its memory.

    A sample is the line's JSON value, or a dictionary of the row's values. Blank lines are none. In
    Parquet files a row is read with its row group, of which the last one is kept: with
    `shuffle=True` in the loader, write small row groups.

    Raises ConfigurationError for files that are missing, empty together, of another kind, or that
    change while they are read, and if pyarrow is missing.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
        if not paths:
            raise ConfigurationError("elastic.Indexed: give at least one file")
        cache = Path(cache_dir) if cache_dir is not None else _default_cache()
        wanted = None if columns is None else list(columns)
        self._sources = [_source(Path(path), wanted, cache) for path in paths]
        self._ends = list(itertools.accumulate(len(source) for source in self._sources))
        if not self._ends[-1]:
            raise ConfigurationError(f"elastic.Indexed: there is no sample in {paths[0]}")

    def __len__(self) -> int:
        """The number of samples in all files."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Read a sample. A negative index counts from the end; IndexError outside."""
        number = operator.index(index)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = bisect.bisect_right(self._ends, number)
        before = self._ends[which - 1] if which else 0
        return self._sources[which].read(number - before)


class _Source(Protocol):
    """One file."""

    def __len__(self) -> int: ...

    def read(self, number: int) -> Any:
        """Read sample `number` of this file."""
        ...


def _source(path: Path, columns: list[str] | None, cache: Path) -> _Source:
    if path.suffix in _JSONL:
        return _Lines(path, cache)
    if path.suffix in _PARQUET:
        return _Rows(path, columns)
    raise ConfigurationError(
        f"elastic.Indexed: {path} is not named as a kind that can be read "
        f"({', '.join((*_JSONL, *_PARQUET))}); unpack compressed files first, since no sample in "
        "the middle of them can be found"
    )


class _Lines:
    """A JSONL file. The places of its lines are mapped into memory; lines are read from the file,
    so that pages of data do not count as this process's memory."""

    def __init__(self, path: Path, cache: Path) -> None:
        self._path = path
        self._index: Path | None = None
        self._descriptor: int | None = None
        try:
            found = path.stat()
            self._size, self._changed_ns = found.st_size, found.st_mtime_ns
            self._offsets = self._indexed(cache)
        except OSError as error:
            raise _unreadable(path, error) from error

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getstate__(self) -> dict[str, Any]:
        """For loader processes: they open the file, and map the index, by themselves."""
        state = self.__dict__ | {"_descriptor": None}
        if self._index is not None:
            state["_offsets"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._index is not None:
            try:
                self._offsets = _mapped(self._index)
            except (OSError, ValueError):  # something has emptied the cache meanwhile
                self._offsets = np.concatenate(list(self._find()))

    def read(self, number: int) -> Any:
        begin, end = map(int, self._offsets[number : number + 2])
        line = os.pread(self._opened(), end - begin, begin)
        try:
            return json.loads(line)
        except ValueError as error:
            raise ValueError(f"sample {number} of {self._path}, at byte {begin}: {error}") from None

    def _opened(self) -> int:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY)
                found = os.fstat(self._descriptor)
            except OSError as error:
                raise _unreadable(self._path, error) from error
            if (found.st_size, found.st_mtime_ns) != (self._size, self._changed_ns):
                raise ConfigurationError(
                    f"elastic.Indexed: {self._path} has been written to since its lines were found "
                    f"(it has {found.st_size} bytes, and had {self._size}); do not change files "
                    "that are read"
                )
        return self._descriptor

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]

    def _indexed(self, cache: Path) -> Offsets:
        """Where each line begins and the last one ends: from the cache, or found and kept there."""
        file = xxhash.xxh3_64_hexdigest(os.fsencode(self._path.resolve()))
        index = cache / f"{file}-{self._size}-{self._changed_ns}.offsets"
        with contextlib.suppress(OSError, ValueError):
            offsets = _mapped(index)
            if len(offsets) and offsets[-1] == self._size:
                self._index = index
                return offsets
        partial = index.with_suffix(f".{secrets.token_hex(8)}")  # containers may share pids
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as out:
                for some in self._find():
                    some.tofile(out)
            partial.replace(index)
            for old in cache.glob(f"{file}-*.offsets"):
                if old != index:
                    old.unlink(missing_ok=True)
        except OSError:  # read-only, or full
            with contextlib.suppress(OSError):
                partial.unlink()
            return np.concatenate(list(self._find()))
        self._index = index
        return _mapped(index)

    def _find(self) -> Iterator[Offsets]:
        """Find where lines that are not blank begin, some at a time; at last the file's size."""
        with self._path.open("rb") as file:
            begin, at, is_blank = 0, 0, True  # of the line whose end has not come yet
            while chunk := file.read(_CHUNK_BYTES):
                content = np.frombuffer(chunk, np.uint8)
                ends = np.flatnonzero(content == _NEWLINE)
                if len(ends):
                    begins = np.concatenate([[0], ends[:-1] + 1])
                    counts = content[begins] > _SPACE
                    for line in np.flatnonzero(~counts):
                        counts[line] = bool(chunk[begins[line] : ends[line]].strip())
                    counts[0] |= not is_blank
                    places = begins.astype(np.int64) + at
                    places[0] = begin
                    yield places[counts]
                    begin = at + int(ends[-1]) + 1
                    is_blank = not chunk[ends[-1] + 1 :].strip()
                else:
                    is_blank = is_blank and not chunk.strip()
                at += len(chunk)
            yield np.array([at] if is_blank else [begin, at], np.int64)


def _mapped(index: Path) -> Offsets:
    return np.memmap(index, np.int64, mode="r")


class _Rows:
    """A Parquet file, opened in each process by itself."""

    def __init__(self, path: Path, columns: list[str] | None) -> None:
        self._path, self._columns = path, columns
        self._file: Any = None
        self._process = 0
        self._group: tuple[int, Any] = (-1, None)
        """The row group that was read last, and its number."""
        meta = self._opened().metadata
        rows = (meta.row_group(number).num_rows for number in range(meta.num_row_groups))
        self._ends = list(itertools.accumulate(rows))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None, "_group": (-1, None)}

    def read(self, number: int) -> Any:
        file = self._opened()
        group = bisect.bisect_right(self._ends, number)
        if self._group[0] != group:
            table = file.read_row_group(group, columns=self._columns, use_threads=False)
            self._group = group, table
        before = self._ends[group - 1] if group else 0
        return self._group[1].slice(number - before, 1).to_pylist()[0]

    def _opened(self) -> Any:
        if self._file is None or self._process != os.getpid():
            try:
                from pyarrow import ArrowException, parquet  # noqa: PLC0415 - only if it is used
            except ImportError:
                raise ConfigurationError(
                    f"elastic.Indexed: {self._path} needs pyarrow, which is not installed: "
                    "pip install pyarrow"
                ) from None
            try:
                self._file = parquet.ParquetFile(self._path, memory_map=True)
            except OSError as error:
                raise _unreadable(self._path, error) from error
            except ArrowException as error:
                raise ConfigurationError(
                    f"elastic.Indexed: {self._path} is no Parquet file: {error}"
                ) from error
            self._process, self._group = os.getpid(), (-1, None)
        return self._file


def _default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "elastic"


def _unreadable(path: Path, error: OSError) -> Exception:
    return refusal_of(f"elastic.Indexed: cannot read {path}: {error.strerror or error}", error)
