"""Which checkpoints a directory holds: found, verified, committed and removed; and which run saves
there: the one that began last.

Two jobs in one directory, as a command that was copied makes them, would take each other's
checkpoints for their own. The one that was there first is told, at its next save.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

from elastic.checkpoint import documents
from elastic.checkpoint import manifest as manifests
from elastic.checkpoint.digest import Digester, FileDigest, difference
from elastic.checkpoint.directory import CheckpointDirectory
from elastic.checkpoint.layout import (
    MANIFEST,
    is_of_generation,
    is_structure_name,
    parse_shard_name,
    parse_step_directory_name,
    path_in_step,
    step_directory_name,
)
from elastic.checkpoint.manifest import Manifest
from elastic.core.legible import is_instant
from elastic.errors import CheckpointDamaged, CheckpointWriteError, ElasticError


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """The steps found in a directory, newest first.

    `uncommitted` are saves without a manifest: still in progress, or abandoned.
    """

    committed: tuple[int, ...]
    uncommitted: tuple[int, ...]


class Damage(enum.Enum):
    """What can be wrong with a stored file."""

    MISSING = "missing"
    WRONG_SIZE = "wrong size"
    WRONG_DIGEST = "wrong digest"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One damaged file of a checkpoint; `detail` is a clause that follows its name."""

    name: str
    damage: Damage
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def scan(directory: CheckpointDirectory) -> Catalog:
    """Return which steps have a manifest and which only remains."""
    steps = [parse_step_directory_name(name) for name in directory.list()]
    found = sorted((step for step in steps if step is not None), reverse=True)
    committed = {step for step in found if is_committed(directory, step)}
    return Catalog(
        committed=tuple(step for step in found if step in committed),
        uncommitted=tuple(step for step in found if step not in committed),
    )


def list_checkpoints(directory: CheckpointDirectory) -> tuple[int, ...]:
    """Return the steps of the committed checkpoints, newest first."""
    return scan(directory).committed


def is_committed(directory: CheckpointDirectory, step: int) -> bool:
    """Whether the step has a manifest; says nothing about damage."""
    return directory.size_bytes(path_in_step(step, MANIFEST)) is not None


def read_manifest(directory: CheckpointDirectory, step: int) -> Manifest:
    """Return a committed checkpoint's manifest.

    Raises CheckpointDamaged if it is missing, not readable or that of another step.
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
    """Compare every file of a committed checkpoint with its digest; no problems means intact.

    `on_bytes` is told the length of each piece as it has been read.
    """
    try:
        manifest = read_manifest(directory, step)
    except CheckpointDamaged as error:
        return [Problem(name=MANIFEST, damage=Damage.UNREADABLE, detail=str(error))]
    found = (_problem(directory, step, file, on_bytes) for file in manifest.files)
    return [problem for problem in found if problem is not None]


def prepare(directory: CheckpointDirectory, step: int) -> None:
    """Clear away what an earlier attempt left of this step, before a new save of it begins.

    A step is saved again only when its first checkpoint was damaged or never committed. The
    files of a committed one are never overwritten in place: interrupted, that would be visible.
    """
    directory.remove_tree(step_directory_name(step))


def commit(directory: CheckpointDirectory, manifest: Manifest) -> None:
    """Make a checkpoint visible by writing its manifest, which is never replaced.

    Raises CheckpointWriteError, without writing, if a file of it cannot be seen from here, and
    FileExistsError if it has one: another coordinator, that led meanwhile, was first.
    """
    for file in manifest.files:
        relative = path_in_step(manifest.step, file.name)
        size_bytes = directory.size_bytes(relative)
        if size_bytes != file.size_bytes:
            found = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            raise CheckpointWriteError(
                f"step {manifest.step} is not committed: {directory.url}/{relative} {found} where "
                f"{file.size_bytes} bytes were reported written; is this directory shared by "
                "all nodes?"
            )
    path = path_in_step(manifest.step, MANIFEST)
    directory.write(path, manifests.to_json(manifest), replace=False)


def sweep(directory: CheckpointDirectory, manifest: Manifest) -> list[str]:
    """Remove what other groups left of the step of a committed checkpoint; return the names.

    A late writer may bring such a file after that. Nobody reads it, and it goes with the step.
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


def discard(directory: CheckpointDirectory, step: int, generation: int) -> None:
    """Remove what a group has written of a save that cannot be completed any more.

    Only for one of which a part was refused: any other may be committed by somebody else.
    """
    name = step_directory_name(step)
    names = directory.list(name)
    left = [n for n in names if is_of_generation(n, generation)]
    for file in left:
        directory.remove(path_in_step(step, file))
    if left and len(left) == len(names):
        directory.remove_tree(name)


def prune(directory: CheckpointDirectory, keep_last: int) -> list[int]:
    """Keep the newest `keep_last` checkpoints (at least 1); return the steps removed.

    Abandoned saves older than the newest checkpoint go too. A save newer than it is still in
    progress and stays. Raises CheckpointWriteError if some could not be removed, after the others.
    """
    assert keep_last >= 1, f"the newest checkpoint is never removed: keep_last={keep_last}"
    catalog = scan(directory)
    if not catalog.committed:
        return []
    abandoned = [step for step in catalog.uncommitted if step < catalog.committed[0]]
    removed = sorted([*catalog.committed[keep_last:], *abandoned])
    kept: dict[int, ElasticError] = {}
    for step in removed:  # oldest first, so that an interruption leaves the newest ones
        try:
            directory.remove_tree(step_directory_name(step))
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
    digester = Digester()
    try:
        for piece in directory.chunks(path_in_step(step, expected.name)):
            digester.update(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    except FileNotFoundError:
        return Problem(name=expected.name, damage=Damage.MISSING, detail="it is missing")
    except CheckpointDamaged as error:
        return Problem(name=expected.name, damage=Damage.UNREADABLE, detail=str(error))
    found = digester.result(expected.name)
    detail = difference(expected, found)
    if detail is None:
        return None
    same_size = found.size_bytes == expected.size_bytes
    damage = Damage.WRONG_DIGEST if same_size else Damage.WRONG_SIZE
    return Problem(name=expected.name, damage=damage, detail=detail)


OWNER = "owner.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """run: the job's incarnation, the same under all its leaders."""

    job: str
    run: str
    since_unix_s: float


def claim(directory: CheckpointDirectory, owner: Owner) -> Owner | None:
    """From now on `owner` saves here; return the run that did before, if it was another.

    A leader that follows another of its run changes nothing. Raises what the directory does.
    """
    before = read(directory)
    if before is not None and before.run == owner.run:
        return None
    directory.write(OWNER, documents.encode(asdict(owner)))
    return before


def require(directory: CheckpointDirectory, owner: Owner) -> None:
    """Raise CheckpointWriteError if another run has begun to save here since `claim`."""
    now = read(directory)
    if now is None:  # somebody has tidied up
        claim(directory, owner)
    elif now.run != owner.run:
        since = datetime.datetime.fromtimestamp(now.since_unix_s, datetime.timezone.utc)
        raise CheckpointWriteError(
            f"a run of job {now.job} saves in {directory.url} since {since:%F %T} UTC: both "
            "would go on from each other's checkpoints; give each job a checkpoint directory of "
            "its own, and start the one that keeps this one again"
        )


def read(directory: CheckpointDirectory) -> Owner | None:
    """None if there is none, or what is there makes no sense. Raises TransientError."""
    where = f"{directory.url}/{OWNER}"
    try:
        document = documents.decode(directory.read(OWNER), where)
        documents.only_keys(document, frozenset(field.name for field in fields(Owner)), where)
        since = documents.field(document, "since_unix_s", float, where)
        if not is_instant(since):
            return None
        return Owner(
            job=documents.field(document, "job", str, where),
            run=documents.field(document, "run", str, where),
            since_unix_s=since,
        )
    except (FileNotFoundError, CheckpointDamaged):
        return None
