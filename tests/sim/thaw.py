"""Makes elastic.core faster for the simulator: its frozen records become ordinary classes, and
access to enum members becomes quick. Otherwise these take a quarter of a history's time.

Only the construction of records changes. mypy and all other tests notice code that modifies one.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable
from typing import Any

_MISSING: Any = object()


def thaw(package: str) -> None:
    """Thaw all frozen dataclasses in the modules of `package` that are already imported, and speed
    up all enums."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith(f"{package}.")]
    for module in modules:
        for record in list(vars(module).values()):
            if isinstance(record, type) and record.__module__ == module.__name__:
                _thaw(record)
    for module in modules:
        if vars(module).get("replace") is dataclasses.replace:
            vars(module)["replace"] = _replace
    if "A" in vars(_Sample) and "__getattr__" in vars(type(_Sample)):
        del type(_Sample).__getattr__


class _Sample(enum.Enum):
    """An enum to inspect. Python 3.11 keeps members in the class, but enums still have the
    `__getattr__` that 3.10 needs: with it every access takes five times as long."""

    A = 1


def _thaw(record: type) -> None:
    parameters = getattr(record, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen or "__init__" not in vars(record):
        return
    fields = [f for f in dataclasses.fields(record) if f.init]
    known: dict[str, Any] = {"_MISSING": _MISSING}
    arguments, body = [], []
    for f in fields:
        value, argument = f.name, f.name
        if f.default_factory is not dataclasses.MISSING:
            known[f"_{f.name}"], argument = f.default_factory, f"{f.name}=_MISSING"
            value = f"_{f.name}() if {f.name} is _MISSING else {f.name}"
        elif f.default is not dataclasses.MISSING:
            known[f"_{f.name}"], argument = f.default, f"{f.name}=_{f.name}"
        arguments.append(argument)
        body.append(f"self.{f.name} = {value}")
    body += ["self.__post_init__()"] if hasattr(record, "__post_init__") else []
    star = "*, " if fields and fields[0].kw_only else ""
    source = f"def __init__(self, {star}{', '.join(arguments)}):\n  " + "\n  ".join(
        body or ["pass"]
    )
    exec(source, known)
    record.__init__ = known["__init__"]  # type: ignore[misc]
    del record.__setattr__, record.__delattr__
    _fields[record] = tuple(f.name for f in fields)


_fields: dict[type, tuple[str, ...]] = {}
"""The names of the fields of each thawed record."""
_copiers: dict[tuple[Any, ...], Callable[..., Any]] = {}
"""Functions that copy a record, by its type and the names of the fields to change."""


def _replace(record: Any, /, **changes: Any) -> Any:
    """Like dataclasses.replace, but faster for thawed records."""
    kind = record.__class__
    key = (kind, *changes)
    copier = _copiers.get(key)
    if copier is None:
        if kind not in _fields:
            return dataclasses.replace(record, **changes)
        copier = _copiers[key] = _copier(kind, tuple(changes))
    return copier(record, **changes)


def _copier(kind: type, changes: tuple[str, ...]) -> Callable[..., Any]:
    body = [f"copy.{f} = {f if f in changes else f'record.{f}'}" for f in _fields[kind]]
    body += ["copy.__post_init__()"] if hasattr(kind, "__post_init__") else []
    known: dict[str, Any] = {"kind": kind, "new": object.__new__}
    lines = [f"def copier(record, {', '.join(changes)}):", "copy = new(kind)", *body, "return copy"]
    exec("\n  ".join(lines), known)
    copier: Callable[..., Any] = known["copier"]
    return copier
