"""Makes the frozen records of elastic.core ordinary: to build them is a sixth of a history's time.

Only how they are built changes. That nobody changes one is seen by mypy and by every other test.
"""

from __future__ import annotations

import dataclasses
import sys
from operator import attrgetter
from typing import Any

_MISSING: Any = object()


def thaw(package: str) -> None:
    """All frozen dataclasses of the modules of `package` that are imported by now."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith(f"{package}.")]
    for module in modules:
        for record in list(vars(module).values()):
            if isinstance(record, type) and record.__module__ == module.__name__:
                _thaw(record)
    for module in modules:
        if vars(module).get("replace") is dataclasses.replace:
            vars(module)["replace"] = _replace


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
    if len(fields) > 1:
        names = tuple(f.name for f in fields)
        _parts[record] = names, attrgetter(*names)


_parts: dict[type, tuple[tuple[str, ...], attrgetter[Any]]] = {}


def _replace(record: Any, /, **changes: Any) -> Any:
    """As dataclasses.replace."""
    kind = type(record)
    if kind not in _parts:
        return dataclasses.replace(record, **changes)
    names, parts = _parts[kind]
    return kind(**{**dict(zip(names, parts(record), strict=True)), **changes})
