"""Writes and commits checkpoints as a group of workers and its coordinator would."""

from __future__ import annotations

import torch

from elastic.checkpoint import catalog
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.directory import CheckpointDirectory
from elastic.checkpoint.documents import Json
from elastic.worker.state.job_state import JobState
from elastic.worker.state.shards import Structure, copy_share, plan_shards, write_share
from elastic.worker.state.tensor_specs import describe
from elastic.worker.state.tree import flatten
from tests.unit.checkpoint.manifests import make_manifest
from tests.unit.worker.trees import DTYPES, make_tensor

GROUP = "g1-run"


def make_state(seed: int) -> dict[str, object]:
    """Return a state with tensors of every dtype, scalar, empty and transposed ones, and values."""
    tensors = {str(dtype): make_tensor(dtype, (3, 5), seed) for dtype in DTYPES}
    return {
        "model": tensors,
        "optimizer": {
            "step": torch.tensor(float(seed)),
            "empty": torch.empty(0, 4),
            "transposed": make_tensor(torch.float32, (4, 7), seed).t(),
            "lr": 0.1,
            "betas": (0.9, float("inf")),
        },
        "seed": seed,
    }


def save(
    directory: CheckpointDirectory, step: int, state: object, count: int = 2, group: str = GROUP
) -> None:
    """Save as `count` workers do, one after the other, then commit."""
    catalog.commit(
        directory, make_manifest(step, count, write(directory, step, state, count, group))
    )


def write(
    directory: CheckpointDirectory, step: int, state: object, count: int = 2, group: str = GROUP
) -> list[FileDigest]:
    """Write the files of `count` workers, without the commit. state: a tree, or a job's state."""
    flat = state.capture() if isinstance(state, JobState) else flatten(state)
    extra: dict[str, Json] = {"note": "kept"}
    if isinstance(state, JobState):
        extra = state.extra()
    specs = describe(flat.tensors)
    structure = Structure(specs=specs, skeleton=flat.skeleton, extra=extra)
    files: list[FileDigest] = []
    for index, pieces in enumerate(plan_shards(specs, count)):
        share = copy_share(flat.tensors, pieces)
        with_structure = structure if index == 0 else None
        files += write_share(directory, step, group, index, count, share, with_structure)
    return files
