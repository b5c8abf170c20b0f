"""Makes manifests for tests to which only the files matter."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.manifest import Manifest


def make_manifest(step: int, count: int, files: Iterable[FileDigest]) -> Manifest:
    """The manifest of a save by `count` workers."""
    return Manifest(
        job="job",
        step=step,
        generation=1,
        world_size=count,
        epoch=0,
        cursor=0,
        learning_rate={},
        created_unix_s=0.0,
        files=tuple(files),
    )
