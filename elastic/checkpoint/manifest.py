"""Writes and parses the manifest, the document that commits a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import xxhash

from elastic.checkpoint import documents
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.documents import Json
from elastic.checkpoint.layout import is_structure_name, parse_shard_name, run_tag_in
from elastic.errors import CheckpointDamaged

FORMAT_VERSION = 2
_READABLE = (1, FORMAT_VERSION)  # version 1 differs only in the names of the files

_CHECKSUM = "manifest_xxh3_128"
_HEX_128 = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything needed to resume from a checkpoint, except the files that it lists.

    `step` counts committed steps, `cursor` the samples consumed of `epoch`; `world_size` is the
    number of workers that saved. `files` are the checkpoint's other files, by plain name.
    """

    format_version: int = FORMAT_VERSION
    job: str
    step: int
    generation: int
    world_size: int
    epoch: int
    cursor: int
    learning_rate: Mapping[str, Json]
    created_unix_s: float
    files: tuple[FileDigest, ...]

    @property
    def run(self) -> str:
        """The tag of the run that saved, as the names of its files have it. Empty in version 1,
        which is older than any run with a tag."""
        return next((tag for tag in map(run_tag_in, (f.name for f in self.files)) if tag), "")


def to_json(manifest: Manifest) -> bytes:
    """Return the manifest as JSON with a checksum of itself.

    Raises ValueError or TypeError if `learning_rate` is not plain, finite JSON.
    """
    document: dict[str, object] = {
        **{field.name: getattr(manifest, field.name) for field in fields(manifest)},
        "learning_rate": dict(manifest.learning_rate),
        "created_unix_s": float(manifest.created_unix_s),
        "files": [asdict(file) for file in manifest.files],
    }
    return documents.encode({**document, _CHECKSUM: _checksum(document)})


def from_json(content: bytes, where: str) -> Manifest:
    """Parse a manifest. Raises CheckpointDamaged, which names `where` and what is wrong."""
    document = documents.decode(content, where)
    version = documents.field(document, "format_version", int, where)
    if version not in _READABLE:
        raise CheckpointDamaged(
            f"{where} has format version {version}; this version of elastic reads only "
            f"{' and '.join(map(str, _READABLE))}: load it with the version that wrote it"
        )
    stored = documents.field(document, _CHECKSUM, str, where)
    body = {key: value for key, value in document.items() if key != _CHECKSUM}
    manifest = _manifest(body, where)
    if _checksum(body) != stored:
        raise CheckpointDamaged(f"{where} does not match its own checksum {stored}")
    return manifest


def _manifest(body: Mapping[str, Json], where: str) -> Manifest:
    manifest = documents.read(Manifest, body, where, exact=(Manifest, FileDigest))
    for i, file in enumerate(manifest.files):
        _require_plain(file, f"files[{i}] in {where}")
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise CheckpointDamaged(f"{where} lists a file twice")
    return manifest


def _require_plain(file: FileDigest, where: str) -> None:
    # Names are joined to a path: those of a checkpoint's files cannot lead out of the directory.
    if parse_shard_name(file.name) is None and not is_structure_name(file.name):
        raise CheckpointDamaged(
            f"{where}: {file.name!r} is not the name of a file in the checkpoint"
        )
    if _HEX_128.fullmatch(file.xxh3_128) is None:
        raise CheckpointDamaged(f"{where}: {file.xxh3_128!r} is not a 128-bit digest")


def _checksum(document: Mapping[str, object]) -> str:
    return str(xxhash.xxh3_128_hexdigest(documents.encode(document)))
