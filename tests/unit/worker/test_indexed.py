"""elastic.Indexed reads any sample of JSONL and Parquet files, at once and in constant memory."""

from __future__ import annotations

import json
import pickle
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import elastic
from elastic.core.data_order import DataPosition
from elastic.errors import ConfigurationError
from elastic.worker import indexed
from elastic.worker.data_loader import BatchPlanner, DataLoader


def indexed_in(tmp_path: Path, *files: Path, **options: Any) -> elastic.Indexed:
    return elastic.Indexed(files, **{"cache_dir": tmp_path / "cache", **options})


def jsonl(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


CASES = {
    "usual": (b'{"n": 1}\n{"n": 2}\n', [{"n": 1}, {"n": 2}]),
    "no last newline": (b"1\n22\n333", [1, 22, 333]),
    "blank lines": (b"\n\n1\n\n\n2\n\n", [1, 2]),
    "windows": (b"1\r\n\r\n22\r\n", [1, 22]),
    "spaces": (b" \n \t\n1\n   \n 2 \n\r\n  3\n \t", [1, 2, 3]),
    "one": (b"7", [7]),
    "unicode": ('"\u00e4\u2028"\n"b"\n'.encode(), ["\u00e4\u2028", "b"]),
}


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_each_line_that_is_not_blank_is_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(indexed, "_CHUNK_BYTES", chunk)
    content, right = CASES[name]
    data = indexed_in(tmp_path, jsonl(tmp_path / "a.jsonl", content))
    assert [data[n] for n in range(len(data))] == right
    assert data[-1] == right[-1]
    for outside in (len(right), -len(right) - 1):
        with pytest.raises(IndexError):
            data[outside]


def test_several_files_follow_each_other_and_empty_ones_have_no_sample(tmp_path: Path) -> None:
    contents = [b"0\n1\n", b"", b"2\n", b"\n", b"3\n4\n5"]
    files = [jsonl(tmp_path / f"{n}.ndjson", each) for n, each in enumerate(contents)]
    data = indexed_in(tmp_path, *files)
    assert [data[n] for n in range(len(data))] == list(range(6))
    with pytest.raises(ConfigurationError, match="there is no sample"):
        indexed_in(tmp_path, files[1], files[3])


def test_the_index_is_kept_and_made_anew_for_a_file_that_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = jsonl(tmp_path / "a.jsonl", b"1\n2\n"), tmp_path / "cache"
    indexed_in(tmp_path, file)
    (kept,) = cache.iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(indexed._Lines, "_find", lambda _: pytest.fail("it is known"))
        assert len(indexed_in(tmp_path, file)) == 2
    kept.write_bytes(b"damaged")
    assert len(indexed_in(tmp_path, file)) == 2
    jsonl(file, b"1\n2\n3\n")
    assert len(indexed_in(tmp_path, file)) == 3
    assert len(list(cache.iterdir())) == 1, "the old one is removed"


def test_without_a_cache_the_index_is_in_memory(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", b"1\n2\n")
    (tmp_path / "file").touch()
    data = indexed_in(tmp_path, file, cache_dir=tmp_path / "file" / "below")
    assert [data[0], data[1]] == [1, 2]
    assert pickle.loads(pickle.dumps(data))[1] == 2


def test_a_cache_that_was_emptied_meanwhile_is_not_needed(tmp_path: Path) -> None:
    sent = pickle.dumps(indexed_in(tmp_path, jsonl(tmp_path / "a.jsonl", b"1\n2\n")))
    for kept in (tmp_path / "cache").iterdir():
        kept.unlink()
    data = pickle.loads(sent)
    assert [data[0], data[1]] == [1, 2]


def test_processes_of_one_pid_share_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers: one must not write to the file that another one is writing."""
    file, find = jsonl(tmp_path / "a.jsonl", b"1\n2\n3\n"), indexed._Lines._find
    read: list[int] = []

    def slowly(lines: indexed._Lines) -> Iterator[indexed.Offsets]:
        yield from find(lines)
        if not read:
            read.append(1)
            other = indexed_in(tmp_path, file)
            read.extend(other[n] for n in range(3))
            monkeypatch.undo()

    monkeypatch.setattr(indexed._Lines, "_find", slowly)
    data = indexed_in(tmp_path, file)
    assert [data[n] for n in range(3)] == read[1:] == [1, 2, 3]
    source: Any = data._sources[0]
    assert source._index.exists(), "what it wrote was its own"


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for name, why in {
        "missing.jsonl": "No such file",
        "data.jsonl.gz": "unpack compressed files",
        "data.csv": r"\.jsonl, \.ndjson, \.parquet",
    }.items():
        with pytest.raises(ConfigurationError, match=why):
            indexed_in(tmp_path, tmp_path / name)
    with pytest.raises(ConfigurationError, match="at least one file"):
        indexed_in(tmp_path)
    data = indexed_in(tmp_path, jsonl(tmp_path / "bad.jsonl", b"1\n{\n"))
    assert data[0] == 1
    with pytest.raises(ValueError, match=r"sample 1 of .*bad\.jsonl, at byte 2: "):
        data[1]
    data = indexed_in(tmp_path, file := jsonl(tmp_path / "grows.jsonl", b"1\n"))
    jsonl(file, b"1\n2\n")
    with pytest.raises(ConfigurationError, match="has 4 bytes, and had 2"):
        data[0]
    data = indexed_in(tmp_path, file)
    jsonl(tmp_path / "other.jsonl", b"33\n\n").replace(file)
    with pytest.raises(ConfigurationError, match="written to since its lines were found"):
        data[0]


def test_loader_processes_read_the_samples_that_the_steps_have(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", b"".join(b'{"n": %d}\n' % n for n in range(40)))
    data = indexed_in(tmp_path, file)
    assert data[39] == {"n": 39}
    assert pickle.loads(pickle.dumps(data))[39] == {"n": 39}
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
    planner = BatchPlanner(loader, DataPosition(), rank=0, world_size=1, epochs=1)
    seen = []
    while planner.next_plan() is not None:
        seen.extend(planner.fetch()["n"].tolist())
    planner.close()
    assert sorted(seen) == list(range(40))


def test_a_job_goes_on_at_once_far_in_the_data(tmp_path: Path) -> None:
    file = tmp_path / "large.jsonl"
    with file.open("w") as out:
        out.writelines(f"{n}\n" for n in range(1_000_000))
    loader = DataLoader(indexed_in(tmp_path, file), batch_size=2)
    order = loader.position_to_index(0)
    begun = time.monotonic()
    planner = BatchPlanner(loader, DataPosition(cursor=999_000), rank=0, world_size=1, epochs=1)
    assert planner.next_plan() is not None
    assert planner.fetch().tolist() == [order[999_000], order[999_001]]
    assert time.monotonic() - begun < 1.0
    planner.close()


def test_rows_of_parquet_files_are_samples(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # noqa: PLC0415

    rows = [{"n": n, "text": f"t{n}"} for n in range(25)]
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=10)
    lines = jsonl(tmp_path / "b.jsonl", json.dumps({"n": 25}).encode())
    data = pickle.loads(pickle.dumps(indexed_in(tmp_path, file, lines)))
    places = random.Random(1).sample(range(25), 25)
    assert [data[n] for n in places] == [rows[n] for n in places]
    assert data[25] == {"n": 25}
    assert indexed_in(tmp_path, file, columns=["n"])[24] == {"n": 24}
    with pytest.raises(ConfigurationError, match="is no Parquet file"):
        indexed_in(tmp_path, jsonl(tmp_path / "c.parquet", b"no parquet file here"))


def test_parquet_without_pyarrow_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match="pip install pyarrow"):
        indexed_in(tmp_path, jsonl(tmp_path / "a.parquet", b""))
