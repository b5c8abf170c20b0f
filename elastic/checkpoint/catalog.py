"""Lists, verifies, commits and removes the checkpoints of a directory, and records its owner.

The owner is the run that began last. Two jobs in one directory, for example because a command was
copied, would resume from each other's checkpoints. `require` refuses the next commit of the run
that was there first. Beside the owner stands where its groups went on (`Fork`): a checkpoint of a
lineage that was given up has a manifest, but it does not count. Everybody who commits, lists,
loads or removes checkpoints asks this document.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from elastic.checkpoint import documents
from elastic.checkpoint import manifest as manifests
from elastic.checkpoint.digest import Digester, FileDigest, difference
from elastic.checkpoint.directory import CheckpointDirectory
from elastic.checkpoint.layout import (
    MANIFEST,
    is_of_group,
    is_structure_name,
    parse_shard_name,
    parse_step_directory_name,
    path_in_step,
    run_tag,
    step_directory_name,
)
from elastic.checkpoint.manifest import Manifest
from elastic.core.forks import Fork, counts, with_fork
from elastic.errors import CheckpointDamaged, CheckpointWriteError, ConfigurationError, ElasticError


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """The steps in a directory, newest first.

    Saves in `uncommitted` have no manifest: they are in progress, or abandoned.
    """

    committed: tuple[int, ...]
    uncommitted: tuple[int, ...]
    superseded: tuple[int, ...] = ()
    """Steps with a checkpoint of a lineage that was given up: nobody loads it."""


class Damage(enum.Enum):
    """What is wrong with a stored file."""

    MISSING = "missing"
    WRONG_SIZE = "wrong size"
    WRONG_DIGEST = "wrong digest"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One damaged file of a checkpoint; `detail` is a clause that follows the file's name."""

    name: str
    damage: Damage
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def scan(directory: CheckpointDirectory) -> Catalog:
    steps = [parse_step_directory_name(name) for name in directory.list()]
    found = sorted((step for step in steps if step is not None), reverse=True)
    whole = {step for step in found if _has_manifest(directory, step)}
    forks = _forks(directory) if whole else ()
    committed = {step for step in whole if _counts(directory, step, forks)}
    return Catalog(
        committed=tuple(step for step in found if step in committed),
        uncommitted=tuple(step for step in found if step not in whole),
        superseded=tuple(step for step in found if step in whole - committed),
    )


def require_parent(directory: CheckpointDirectory) -> None:
    """Raise ConfigurationError if this is the directory of one checkpoint, not of several.

    Taken for a directory without checkpoints, it would have the job begin anew, and save in it.
    """
    parent, _, name = directory.url.rpartition("/")
    step, names = parse_step_directory_name(name), directory.list()
    if MANIFEST not in names:
        if step is not None and any(parse_shard_name(n) or is_structure_name(n) for n in names):
            raise ConfigurationError(
                f"{directory.url} is an unfinished checkpoint of step {step}; give its parent "
                f"directory, {parent}"
            )
        return
    try:
        step = manifests.from_json(directory.read(MANIFEST), directory.url).step
    except (CheckpointDamaged, FileNotFoundError):
        if step is None:
            return  # another program's file
    raise ConfigurationError(
        f"{directory.url} is a checkpoint of step {step}; give its parent directory, {parent}"
    )


def list_checkpoints(directory: CheckpointDirectory) -> tuple[int, ...]:
    """Return the steps of the committed checkpoints, newest first."""
    return scan(directory).committed


def newest_step(directory: CheckpointDirectory) -> int:
    """Return the newest step whose manifest can be read; 0 if there is none.

    Its other files may be damaged all the same. Raises TransientError.
    """
    for step in list_checkpoints(directory):
        with contextlib.suppress(CheckpointDamaged):
            return read_manifest(directory, step).step
    return 0


def is_committed(directory: CheckpointDirectory, step: int) -> bool:
    """Return whether the step has a checkpoint that counts; its files may be damaged all the
    same."""
    return _has_manifest(directory, step) and _counts(directory, step, _forks(directory))


def is_saved(
    directory: CheckpointDirectory, step: int, *, run: str, generation: int, began_at: int
) -> bool:
    """Return whether the step has a checkpoint which a group need not save again: its own, or of
    the very state from which it went on, at step `began_at`. Any other is of another lineage."""
    if not _has_manifest(directory, step):
        return False
    try:
        manifest = read_manifest(directory, step)
    except CheckpointDamaged:
        return True
    if (manifest.run, manifest.generation) == (run_tag(run), generation):
        return True
    return step <= began_at and _counts(directory, step, _forks(directory))


def _counts(directory: CheckpointDirectory, step: int, forks: Sequence[Fork]) -> bool:
    if all(step <= fork.step for fork in forks):
        return True
    try:
        manifest = read_manifest(directory, step)
    except CheckpointDamaged:
        return True  # it cannot be told whose it is; whoever loads it finds the damage
    return counts(forks, manifest.run, manifest.generation, step)


def _forks(directory: CheckpointDirectory) -> tuple[Fork, ...]:
    owner = read(directory)
    return owner.forks if owner is not None else ()


def _has_manifest(directory: CheckpointDirectory, step: int) -> bool:
    try:
        return directory.size_bytes(path_in_step(step, MANIFEST)) is not None
    except CheckpointDamaged:
        return True  # it is there, but the medium cannot read it


def read_manifest(directory: CheckpointDirectory, step: int) -> Manifest:
    """Return a committed checkpoint's manifest.

    Raises CheckpointDamaged if the manifest is missing, unreadable or names another step, and
    TransientError if the storage cannot be reached.
    """
    relative = path_in_step(step, MANIFEST)
    where = f"{directory.url}/{relative}"
    try:
        manifest = manifests.from_json(directory.read(relative), where)
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{where} is missing") from error
    if manifest.step != step:
        raise CheckpointDamaged(f"{where} is the manifest of step {manifest.step}")
    return manifest


def verify(
    directory: CheckpointDirectory, step: int, on_bytes: Callable[[int], None] | None = None
) -> list[Problem]:
    """Compare every file of a committed checkpoint with its digest; return the problems found.

    `on_bytes` is called with the length of each piece that was read.
    """
    try:
        manifest = read_manifest(directory, step)
    except CheckpointDamaged as error:
        return [Problem(name=MANIFEST, damage=Damage.UNREADABLE, detail=str(error))]
    found = (_problem(directory, step, file, on_bytes) for file in manifest.files)
    return [problem for problem in found if problem is not None]


def prepare(directory: CheckpointDirectory, step: int) -> None:
    """Remove what an earlier attempt left of this step, before the step is saved again.

    A step is saved again only if its first checkpoint was damaged or never committed. Files of a
    committed checkpoint are never overwritten in place: an interruption would leave it damaged.
    """
    directory.remove_step(step_directory_name(step))


def commit(directory: CheckpointDirectory, manifest: Manifest) -> None:
    """Make a checkpoint visible by writing its manifest, which is never replaced.

    Raises CheckpointWriteError, and writes nothing, if a file that the manifest lists is missing
    here or has another size. Raises FileExistsError if the step has a manifest: another
    coordinator led meanwhile and committed first.
    """
    for file in manifest.files:
        relative = path_in_step(manifest.step, file.name)
        try:
            size_bytes = directory.size_bytes(relative)
        except CheckpointDamaged as error:
            raise CheckpointWriteError(f"step {manifest.step} is not committed: {error}") from error
        if size_bytes != file.size_bytes:
            found = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            raise CheckpointWriteError(
                f"step {manifest.step} is not committed: {directory.url}/{relative} {found}, but "
                f"{file.size_bytes} bytes were reported as written; is this directory shared by "
                "all nodes?"
            )
    path = path_in_step(manifest.step, MANIFEST)
    directory.write(path, manifests.to_json(manifest), replace=False)


def sweep(directory: CheckpointDirectory, manifest: Manifest) -> list[str]:
    """Remove the files that other groups left in a committed step; return their names.

    A late writer may add such a file afterwards. Nobody reads it; it is removed with the step.
    """
    listed = {file.name for file in manifest.files}
    step = step_directory_name(manifest.step)
    left = [
        name
        for name in directory.list(step)
        if name not in listed and (parse_shard_name(name) is not None or is_structure_name(name))
    ]
    for name in left:
        directory.remove(path_in_step(manifest.step, name))
    return left


def discard(directory: CheckpointDirectory, step: int, group: str) -> None:
    """Remove what a group has written of a save that can no longer be completed. group: its name.

    Call this only for a save that had a part refused, or whose run may not save here: somebody else
    may commit any other save.
    """
    name = step_directory_name(step)
    left = [n for n in directory.list(name) if is_of_group(n, group)]
    for file in left:
        directory.remove(path_in_step(step, file))
    if left and not directory.list(name):
        directory.remove_step(name)


def set_aside(directory: CheckpointDirectory, step: int) -> None:
    """Remove the checkpoint of a lineage that was given up: its manifest and the files in it.

    Another group may be saving the same step: its files stay. What else is left goes with the step
    when it is pruned. Raises CheckpointWriteError.
    """
    manifest = read_manifest(directory, step)
    directory.remove(path_in_step(step, MANIFEST))
    for file in manifest.files:
        directory.remove(path_in_step(step, file.name))


def prune(directory: CheckpointDirectory, keep_last: int) -> list[int]:
    """Keep the newest `keep_last` checkpoints (at least 1); return the steps removed.

    Those of a lineage that was given up do not count, and are removed. Abandoned saves older than
    the newest checkpoint are removed too; newer saves are in progress.
    Raises CheckpointWriteError if some steps cannot be removed, after removing the others.
    """
    assert keep_last >= 1, f"the newest checkpoint is never removed: keep_last={keep_last}"
    catalog = scan(directory)
    newest = catalog.committed[0] if catalog.committed else 0
    abandoned = [step for step in catalog.uncommitted if step < newest]
    removed = sorted([*catalog.committed[keep_last:], *abandoned, *catalog.superseded])
    kept: dict[int, ElasticError] = {}
    for step in removed:  # oldest first: an interruption leaves the newest ones
        try:
            if step > newest:  # superseded, and the step may be being saved
                set_aside(directory, step)
            else:
                directory.remove_step(step_directory_name(step))
        except ElasticError as error:
            kept[step] = error
    if kept:
        steps = ", ".join(map(str, kept))
        raise CheckpointWriteError(
            f"old checkpoints could not be removed and take up space (steps {steps}): "
            f"{next(iter(kept.values()))}"
        )
    return removed


def _problem(
    directory: CheckpointDirectory,
    step: int,
    expected: FileDigest,
    on_bytes: Callable[[int], None] | None,
) -> Problem | None:
    relative = path_in_step(step, expected.name)
    digester = Digester()
    try:
        size_bytes = directory.size_bytes(relative)
        if size_bytes is None:
            return Problem(name=expected.name, damage=Damage.MISSING, detail="it is missing")
        if size_bytes != expected.size_bytes:  # it may be endless
            detail = f"it has {size_bytes} bytes instead of {expected.size_bytes}"
            return Problem(name=expected.name, damage=Damage.WRONG_SIZE, detail=detail)
        for piece in directory.chunks(relative):
            digester.update(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    except FileNotFoundError:
        return Problem(name=expected.name, damage=Damage.MISSING, detail="it is missing")
    except CheckpointDamaged as error:
        return Problem(name=expected.name, damage=Damage.UNREADABLE, detail=str(error))
    wrong = difference(expected, digester.result(expected.name))
    if wrong is None:
        return None
    return Problem(name=expected.name, damage=Damage.WRONG_DIGEST, detail=wrong)


OWNER = "owner.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The run that saves in a directory; `run` is its incarnation, the same under all leaders."""

    job: str
    run: str
    since_unix_s: float
    forks: tuple[Fork, ...] = ()
    """Where groups went on, of this run and earlier ones, oldest first. Absent in a document of an
    older version: then every checkpoint counts."""


def claim(directory: CheckpointDirectory, owner: Owner) -> Owner | None:
    """Make `owner` the run that saves here; return the previous owner if it was another run.

    A new leader of the same run changes nothing. Raises as the directory's methods do.
    """
    before = read(directory)
    if before is not None and before.run == owner.run:
        return None
    _write_owner(
        directory, replace(owner, forks=before.forks if before is not None else owner.forks)
    )
    return before


def record_fork(directory: CheckpointDirectory, owner: Owner, generation: int, step: int) -> Owner:
    """Record that a group of the owner went on from `step`, unless a later group's is recorded.
    Return the owner with all forks. Raises as the directory's methods do."""
    fork = Fork(run_tag(owner.run), generation, step)
    found = replace(owner, forks=with_fork(owner.forks, fork))
    if found != owner:
        _write_owner(directory, found)
    return found


def _write_owner(directory: CheckpointDirectory, owner: Owner) -> None:
    directory.write(OWNER, documents.encode(asdict(owner)))


class DirectoryTaken(CheckpointWriteError):
    """Another run saves in this directory now."""


def require(directory: CheckpointDirectory, owner: Owner) -> Owner:
    """Return the owner as it is recorded. Raises DirectoryTaken if another run has claimed the
    directory since `claim`."""
    now = read(directory)
    if now is None:  # somebody has removed the file
        claim(directory, owner)
        return owner
    if now.run != owner.run:
        since = datetime.datetime.fromtimestamp(now.since_unix_s, datetime.timezone.utc)
        raise DirectoryTaken(
            f"a run of job {now.job} has saved in {directory.url} since {since:%F %T} UTC: both "
            "would load each other's checkpoints; give each job its own checkpoint directory, and "
            "restart the job that keeps this one"
        )
    return now


def read(directory: CheckpointDirectory) -> Owner | None:
    """Return None if there is no owner file or it is not valid. Raises TransientError."""
    where = f"{directory.url}/{OWNER}"
    try:
        document = documents.decode(directory.read(OWNER), where)
        return documents.read(Owner, document, where, added=("forks",), exact=(Owner,))
    except (FileNotFoundError, CheckpointDamaged):
        return None
