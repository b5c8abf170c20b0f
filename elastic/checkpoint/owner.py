"""Which run saves in a directory: the one that began last.

Two jobs in one directory, as a command that was copied makes them, would take each other's
checkpoints for their own. The one that was there first is told, at its next save.
"""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass, fields

from elastic.checkpoint import documents
from elastic.checkpoint.directory import CheckpointDirectory
from elastic.core.legible import is_instant
from elastic.errors import CheckpointDamaged, CheckpointWriteError

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
