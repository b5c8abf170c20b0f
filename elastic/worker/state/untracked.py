"""Finds schedulers, averages and other modules that change and that the script does not track: a
worker that joins would begin with other ones."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from elastic.worker.state.digest import digest_of
from elastic.worker.state.job_state import JobState
from elastic.worker.state.references import optimizers_inside
from elastic.worker.state.signs import address_of, referred_by
from elastic.worker.state.tree import UNCHANGING

_LOOKS = range(3, 6)  # steps: the first ones make what is made late
_KINDS = (nn.Module, LRScheduler, torch.amp.GradScaler)
_MOST_REFERRED = 10_000
_MOST_TENSORS, _MOST_ELEMENTS = 128, 256
_ADVICE = (
    "these change as the script trains, and a worker that joins, or that begins from a checkpoint, "
    "has them as the script builds them: pass them to session.track(), or to "
    "session.track_local() if they may differ between workers"
)


@dataclass(slots=True)
class _Candidate:
    """An object that is not tracked and may hold state."""

    itself: weakref.ref[Any]
    exists_to_change: bool
    """If only once an epoch. Another one must be seen to change."""
    content: int


class Untracked:
    """Looks at the objects of this process as its third, fourth and fifth step begins. Then it
    names schedulers of tracked optimizers, averages and scalers, and other modules that have
    changed in both steps: a frozen teacher has not, nor has a copy that is renewed now and then to
    be evaluated.

    The objects are those that the garbage collector knows. Attributes are read where they are
    stored: no code of the script runs, such as properties, but for `state_dict()` of tracked
    objects.

    tell: called with names and advice.
    """

    def __init__(self, state: JobState, tell: Callable[[str, str], None]) -> None:
        self._state = state
        self._tell = tell
        self._steps = 0
        self._candidates: list[_Candidate] = []

    def step_begins(self) -> bool:
        """A step is handed out. Returns whether to look now."""
        self._steps += 1
        return self._steps in _LOOKS

    @property
    def is_over(self) -> bool:
        return self._steps >= _LOOKS[-1]

    def look(self) -> None:
        held = self._addresses()
        if self._steps == _LOOKS[0]:
            self._candidates = list(self._search(held))
            return
        changing, names = [], set()
        for each in self._candidates:
            item = each.itself()
            before, each.content = each.content, _content(item, held)
            if item is not None and (each.exists_to_change or each.content != before):
                changing.append(each)
                names.add(type(item).__name__)
        self._candidates = [] if self.is_over else changing
        if self.is_over and names:
            self._tell(", ".join(sorted(names)), _ADVICE)

    def _search(self, held: set[int]) -> Iterator[_Candidate]:
        objects = [item for item in gc.get_objects() if issubclass(type(item), _KINDS)]
        known = self._known()
        known.update(id(part) for item in objects for part in _parts(item))
        for item in objects:
            if id(item) in known:
                continue
            kind, content = type(item), _content(item, held)
            changes = (
                (issubclass(kind, AveragedModel) and content != 0)
                or (issubclass(kind, LRScheduler) and id(_own(item).get("optimizer")) in known)
                or (issubclass(kind, torch.amp.GradScaler) and _own(item).get("_enabled") is True)
            )
            if changes or content:
                yield _Candidate(weakref.ref(item), changes, content)

    def _addresses(self) -> set[int]:
        """Return where the tensors of tracked objects are, and 0, which stands for no place."""
        modules = self._state.modules().values()
        own = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        return {0, *map(address_of, own), *map(address_of, self._state.capture().tensors.values())}

    def _known(self) -> set[int]:
        """Return the ids of tracked objects and, but for modules, of what these refer to."""
        known: set[int] = set()
        waiting: deque[Any] = deque(self._state.everything.values())
        while waiting and len(known) < _MOST_REFERRED:
            item = waiting.popleft()
            if type(item) in UNCHANGING or isinstance(item, (type, ModuleType, torch.Tensor)):
                continue
            if isinstance(item, torch.optim.Optimizer):
                known.update(map(id, optimizers_inside(item)))
            elif id(item) not in known and not isinstance(item, nn.Module):
                waiting.extend(referred_by(item) or ())
            known.add(id(item))
        return known


def _own(item: Any) -> dict[str, Any]:
    """Return the attributes in the object's own dictionary."""
    found: dict[str, Any] = object.__getattribute__(item, "__dict__")
    return found


def _parts(item: Any) -> Iterator[Any]:
    """Yield the modules, or schedulers, that this one directly consists of."""
    yield from (part for part in _own(item).get("_modules", {}).values() if part is not None)
    yield from _own(item).get("_schedulers", ())


def _content(item: Any, held: set[int]) -> int:
    """Return a digest of some of the module's tensors that are not at addresses in `held`. 0: it
    has none, or is no module."""
    tensors: list[torch.Tensor] = []
    waiting = [item] if issubclass(type(item), nn.Module) else []
    met = set[int]()
    while waiting:
        module = waiting.pop()
        if id(module) in met:
            continue
        met.add(id(module))
        waiting += _parts(module)
        for registry in ("_parameters", "_buffers"):
            tensors += (
                t
                for t in _own(module).get(registry, {}).values()
                if type(t) in (torch.Tensor, nn.Parameter) and address_of(t) not in held
            )
    some = tensors[:: max(1, len(tensors) // _MOST_TENSORS)]
    return digest_of(t.detach().reshape(-1)[:_MOST_ELEMENTS] for t in some) if some else 0
