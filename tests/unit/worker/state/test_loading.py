"""Loading verifies every byte of a checkpoint, and falls back to the newest intact one."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.checkpoint import catalog
from elastic.checkpoint import directory as directory_module
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.checkpoint.layout import MANIFEST, path_in_step, shard_name, structure_name
from elastic.checkpoint.manifest import Manifest
from elastic.errors import CheckpointDamaged, ConfigurationError, ElasticError, TransientError
from elastic.worker.state.shards import (
    Structure,
    _Assembly,
    load,
    load_latest,
    structure_from_json,
    structure_to_json,
)
from elastic.worker.state.tensor_specs import describe
from elastic.worker.state.tree import flatten, unflatten
from tests.fuzzed_documents import documents, may_be_refused, spliced, thoroughly
from tests.unit.checkpoint.faults import (
    Countdown,
    DyingDirectory,
    DyingOs,
    FailingReads,
    Killed,
    every_kill_point,
)
from tests.unit.checkpoint.manifests import make_manifest
from tests.unit.worker.saving import GROUP, make_state, save, write
from tests.unit.worker.trees import same


def recommit(directory: CheckpointDirectory, manifest: Manifest) -> None:
    """Commit `manifest` in place of the one that is there."""
    directory.remove(path_in_step(manifest.step, MANIFEST))
    catalog.commit(directory, manifest)


def _unexpected(step: int, reason: str) -> None:
    raise AssertionError(f"step {step} is not damaged: {reason}")


def _newest(directory: Any) -> tuple[int, Any]:
    """The step of the newest checkpoint, and the state that it loads as."""
    loaded = load_latest(directory, _unexpected)
    assert loaded is not None
    return loaded.manifest.step, unflatten(loaded.structure.skeleton, loaded.tensors)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    save(open_directory(str(root)), 1, make_state(1), 2)
    save(open_directory(str(root)), 2, make_state(2), 3)
    return root


def test_an_empty_directory_has_no_checkpoint_to_load() -> None:
    assert load_latest(open_directory("memory://nothing/here"), _unexpected) is None


def test_the_newest_checkpoint_is_loaded(saved: Path) -> None:
    step, state = _newest(open_directory(str(saved)))
    assert step == 2
    assert same(state, make_state(2))


def test_the_directory_of_one_checkpoint_is_not_taken_for_an_empty_one(saved: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"a checkpoint of step 2; give .*, {saved}$"):
        load_latest(open_directory(str(saved / "step-000000002")), _unexpected)


NAMES = ["manifest.json", structure_name(GROUP), *(shard_name(i, 3, GROUP) for i in range(3))]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_detected_and_the_previous_checkpoint_is_loaded(
    saved: Path, name: str, data: st.DataObject
) -> None:
    path = saved / path_in_step(2, name)
    intact = path.read_bytes()
    position = data.draw(st.integers(0, len(intact) - 1))
    if data.draw(st.booleans()):
        damaged = intact[:position]
    else:
        flipped = intact[position] ^ (1 << data.draw(st.integers(0, 7)))
        damaged = intact[:position] + bytes([flipped]) + intact[position + 1 :]
    reports: list[tuple[int, str]] = []
    try:
        path.write_bytes(damaged)
        loaded = load_latest(open_directory(str(saved)), lambda *report: reports.append(report))
    finally:
        path.write_bytes(intact)
    assert loaded is not None
    assert same(unflatten(loaded.structure.skeleton, loaded.tensors), make_state(1))
    ((step, reason),) = reports
    assert step == 2
    assert str(path) in reason


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    directory = open_directory(str(tmp_path))
    save(directory, 2, make_state(2), 3)
    path = tmp_path / path_in_step(2, name)
    path.unlink()
    with pytest.raises(CheckpointDamaged, match=f"{path} is missing"):
        load(directory, 2)


def test_all_checkpoints_are_named_if_all_are_damaged(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    for step in (1, 2):
        save(directory, step, make_state(step))
        (tmp_path / path_in_step(step, structure_name(GROUP))).write_bytes(b"{}")
    reports: list[int] = []
    with pytest.raises(CheckpointDamaged, match=r"none of the 2.*step-000000002.*step-000000001"):
        load_latest(directory, lambda step, _: reports.append(step))
    assert reports == [2, 1]


def test_unreachable_storage_is_not_taken_for_damage(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "os", FailingReads(MANIFEST, errno.ESTALE))
    with pytest.raises(TransientError, match="Stale"):
        load_latest(open_directory(str(saved)), _unexpected)


@pytest.mark.parametrize("dropped", NAMES[1:])
def test_a_manifest_that_does_not_list_every_file_is_damage(tmp_path: Path, dropped: str) -> None:
    """Digests alone would not notice a shard that was never reported."""
    directory = open_directory(str(tmp_path))
    save(directory, 2, make_state(2), 3)
    manifest = catalog.read_manifest(directory, 2)
    kept = tuple(file for file in manifest.files if file.name != dropped)
    recommit(directory, replace(manifest, files=kept))
    with pytest.raises(
        CheckpointDamaged, match=r"lacks elements|leave a gap or overlap|0 structure files"
    ):
        load(directory, 2)


def test_the_order_in_which_workers_reported_does_not_matter(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    save(directory, 2, make_state(2), 3)
    manifest = catalog.read_manifest(directory, 2)
    recommit(directory, replace(manifest, files=manifest.files[::-1]))
    assert same(_newest(directory)[1], make_state(2))


def test_a_shard_of_another_model_is_damage(tmp_path: Path) -> None:
    directory, other = open_directory(str(tmp_path / "a")), open_directory(str(tmp_path / "b"))
    save(directory, 2, make_state(2), 1)
    save(other, 2, {"alien": make_state(2)}, 1)
    shard = shard_name(0, 1, GROUP)
    alien = directory.write(path_in_step(2, shard), other.read(path_in_step(2, shard)))
    manifest = catalog.read_manifest(directory, 2)
    kept = tuple(file for file in manifest.files if file.name != shard)
    recommit(directory, replace(manifest, files=(alien, *kept)))
    with pytest.raises(CheckpointDamaged, match=rf"{shard} does not fit"):
        load(directory, 2)


def test_a_checkpoint_of_format_version_1_loads(saved: Path, tmp_path: Path) -> None:
    """Its files do not name the group that wrote them."""
    directory = open_directory(str(tmp_path))
    manifest = catalog.read_manifest(open_directory(str(saved)), 2)
    files = [
        directory.write(
            path_in_step(2, file.name.replace(f"-{GROUP}", "")),
            (saved / path_in_step(2, file.name)).read_bytes(),
        )
        for file in manifest.files
    ]
    recommit(directory, replace(manifest, format_version=1, files=tuple(files)))
    assert {"structure.json", "shard-00002-of-00003.safetensors"} < {f.name for f in files}
    assert catalog.verify(directory, 2) == []
    assert same(_newest(directory)[1], make_state(2))


def test_a_late_writer_of_an_older_group_changes_nothing(tmp_path: Path) -> None:
    """The writer has seen no manifest, then sleeps while another group saves the same step."""
    directory = open_directory(str(tmp_path))
    older, newer = "g3-run", "g4-run"
    late = _Sleeper(directory, before_writing=lambda: save(directory, 5, make_state(4), 2, newer))
    files = write(late, 5, make_state(3), 2, older)
    assert all((tmp_path / path_in_step(5, file.name)).exists() for file in files)
    assert catalog.verify(directory, 5) == []
    assert same(_newest(directory)[1], make_state(4))


def test_two_groups_may_write_the_same_step_and_one_is_committed(tmp_path: Path) -> None:
    directory = open_directory(str(tmp_path))
    write(directory, 5, make_state(3), 3, "g3-run")
    files = write(directory, 5, make_state(4), 2, "g4-run")
    write(directory, 5, make_state(3), 2, "g4-other")  # the fourth group of an earlier run
    catalog.commit(directory, make_manifest(5, 2, files))
    assert catalog.verify(directory, 5) == []
    assert same(_newest(directory)[1], make_state(4))


class _Sleeper:
    """A directory that calls `before_writing` before its first write."""

    def __init__(self, inner: Any, *, before_writing: Callable[[], None]) -> None:
        self._inner = inner
        self._before = [before_writing]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def size_bytes(self, relative: str) -> int | None:
        return None if relative.endswith("manifest.json") else self._inner.size_bytes(relative)

    def write(self, relative: str, data: Any, *, replace: bool = True) -> Any:
        while self._before:
            self._before.pop()()
        return self._inner.write(relative, data, replace=replace)


class TestKilledAtEveryPoint:
    """The newest visible checkpoint always loads, and is one that was saved."""

    def test_a_local_save_killed_at_any_system_call_leaves_a_loadable_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = set()
        for operations in every_kill_point(limit=200):
            directory = open_directory(str(tmp_path / str(operations)))
            save(directory, 1, make_state(1))
            with monkeypatch.context() as patch:
                patch.setattr(directory_module, "os", DyingOs(Countdown(operations)))
                finished = _survives(lambda directory=directory: self._save_and_prune(directory))
            seen.add(self._assert_newest_is_what_was_saved(directory))
            self._assert_it_can_be_done_again(directory)
            if finished:
                break
        assert seen == {1, 2}

    def test_a_remote_save_killed_at_any_operation_leaves_a_loadable_checkpoint(self) -> None:
        seen = set()
        for operations in every_kill_point(limit=50):
            directory = open_directory(f"memory://killed/{operations}")
            save(directory, 1, make_state(1))
            dying = DyingDirectory(directory, Countdown(operations))
            finished = _survives(lambda dying=dying: self._save_and_prune(dying))
            seen.add(self._assert_newest_is_what_was_saved(directory))
            self._assert_it_can_be_done_again(directory)
            if finished:
                break
        assert seen == {1, 2}

    def test_a_killed_save_of_an_existing_step_leaves_a_loadable_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Overwriting in place would leave the old manifest vouching for half of the new files."""
        for operations in every_kill_point(limit=200):
            directory = open_directory(str(tmp_path / str(operations)))
            save(directory, 1, make_state(1))
            save(directory, 2, make_state(3))
            with monkeypatch.context() as patch:
                patch.setattr(directory_module, "os", DyingOs(Countdown(operations)))
                finished = _survives(lambda directory=directory: self._save_and_prune(directory))
            _, state = _newest(directory)
            assert any(same(state, make_state(seed)) for seed in (1, 2, 3))
            if finished:
                break
        assert same(state, make_state(2))

    def _save_and_prune(self, directory: Any) -> None:
        catalog.prepare(directory, 2)
        save(directory, 2, make_state(2))
        catalog.prune(directory, keep_last=1)

    def _assert_newest_is_what_was_saved(self, directory: Any) -> int:
        step, state = _newest(directory)
        assert same(state, make_state(step))
        return step

    def _assert_it_can_be_done_again(self, directory: Any) -> None:
        self._save_and_prune(directory)
        assert self._assert_newest_is_what_was_saved(directory) == 2
        assert catalog.scan(directory) == catalog.Catalog(committed=(2,), uncommitted=())


def _survives(work: Callable[[], None]) -> bool:
    try:
        work()
    except Killed:
        return False
    except ElasticError as error:
        raise AssertionError("a killed process reports nothing") from error
    return True


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def _replaced_header(content: bytes, header: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


@thoroughly
@given(data=st.data())
def test_any_shard_is_loaded_or_reported_as_damage(saved: Path, data: st.DataObject) -> None:
    """The digests match: another program may have written the shard and its manifest."""
    described = (saved / path_in_step(2, structure_name(GROUP))).read_bytes()
    assembly = _Assembly(structure_from_json(described, "s").specs, "root/")
    content = (saved / path_in_step(2, shard_name(0, 3, GROUP))).read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    replaced = documents(header).map(lambda other: _replaced_header(content, other))
    shard = data.draw(replaced | spliced(content))
    with may_be_refused(CheckpointDamaged, naming="root/"):
        assembly.add("shard", iter([memoryview(shard)]))
        assembly.finish()


STATE = flatten({"trained": make_state(1), "options": ({1, 2}, 1j, b"ab", None, float("inf"))})
STRUCTURE = Structure(
    specs=describe(STATE.tensors), skeleton=STATE.skeleton, extra={"ledger": [{"step": 1}]}
)
CONTENT = structure_to_json(STRUCTURE)


def test_a_structure_is_read_as_it_was_written() -> None:
    assert structure_from_json(CONTENT, "s") == STRUCTURE


@thoroughly
@given(content=documents(CONTENT))
def test_any_bytes_are_read_as_a_structure_or_reported_as_damage(content: bytes) -> None:
    """`unflatten` restores the state of a structure that was read, or refuses it."""
    with may_be_refused(CheckpointDamaged, naming="root/structure.json"):
        found = structure_from_json(content, "root/structure.json")
        with may_be_refused(CheckpointDamaged, naming="the stored state"):
            unflatten(found.skeleton, STATE.tensors)
