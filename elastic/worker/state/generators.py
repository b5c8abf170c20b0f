"""The generators that a script draws from without naming one: those of torch, NumPy and Python.

They are each worker's own, and members do not exchange them: dropout and augmentation differ from
rank to rank. A checkpoint keeps those of each rank. A worker that begins in the middle of the job,
without its rank's own, derives them from the script's seed, its rank and the step. Otherwise it
would repeat the noise of the job's first steps.
"""

from __future__ import annotations

import base64
import contextlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import xxhash

from elastic.checkpoint.documents import Json

_UNREADABLE = (LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError)
"""What generators raise for a state of another kind, or of another release of their library."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """What a worker's generators become when it begins in the middle of the job.

    seed: of this place in the job, see `seed_at`. saved: the states that the checkpoint has for
    this rank, from `states`; None: the seed applies.
    """

    seed: int
    saved: Json = None

    def put_in_place(self, device: torch.device) -> None:
        """Set the generators of this process and of `device`."""
        seed_all(self.seed, device)
        if self.saved is not None:
            _set_all(self.saved, device)


def seed_at(seed: int, rank: int, committed: int) -> int:
    """Return the seed, of 63 bits, of a worker that begins as `rank` after `committed` steps of a
    job whose script was seeded with `seed`."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{rank}/{committed}".encode()) & (2**63 - 1)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed all default generators. NumPy's is left alone if the script has replaced its kind."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    if _numpy_state()["bit_generator"] == "MT19937":
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    random.seed(seed)


def states(device: torch.device) -> dict[str, Json]:
    """Return the states of all default generators, some 20 KB of JSON."""
    numpy = _numpy_state()
    version, words, gauss = random.getstate()
    found: dict[str, Json] = {
        "torch": _text(torch.default_generator.get_state()),
        "numpy": cast("Json", _plain(numpy)),
        "python": [version, list(words), gauss],
    }
    if device.type == "cuda":
        found["cuda"] = _text(torch.cuda.get_rng_state(device))
    return found


def _set_all(saved: Json, device: torch.device) -> None:
    """Set the generators from `states`. One whose saved state does not fit stays as it is."""
    found = cast("Mapping[str, Any]", saved)
    with contextlib.suppress(*_UNREADABLE):
        torch.default_generator.set_state(_tensor(found["torch"]))
    with contextlib.suppress(*_UNREADABLE):
        if device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(found["cuda"]), device)
    with contextlib.suppress(*_UNREADABLE):
        np.random.set_state(_arrays(found["numpy"]))
    with contextlib.suppress(*_UNREADABLE):
        version, words, gauss = found["python"]
        random.setstate((version, tuple(words), gauss))


def _numpy_state() -> dict[str, Any]:
    found: dict[str, Any] = np.random.get_state(legacy=False)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "type": str(value.dtype)}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"array", "type"}:
        return np.array(value["array"], dtype=value["type"])
    return {key: _arrays(item) for key, item in value.items()}


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
