"""Makes the frozen records of elastic.core ordinary: to build them is a sixth of a history's time.

Only how they are built changes. That nobody changes one is seen by mypy and by every other test.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any


def thaw(package: str) -> None:
    """All frozen dataclasses of the modules of `package` that are imported by now."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            for record in vars(module).values():
                if isinstance(record, type) and record.__module__ == name:
                    _thaw(record)


def _thaw(record: type) -> None:
    parameters = getattr(record, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen or "__init__" not in vars(record):
        return
    fields = [f for f in dataclasses.fields(record) if f.init]
    if any(f.default_factory is not dataclasses.MISSING for f in fields):
        return
    defaults: dict[str, Any] = {
        f"_{f.name}": f.default for f in fields if f.default is not dataclasses.MISSING
    }
    arguments = [f"{f.name}=_{f.name}" if f"_{f.name}" in defaults else f.name for f in fields]
    star = "*, " if fields and fields[0].kw_only else ""
    body = [f"self.{f.name} = {f.name}" for f in fields]
    body += ["self.__post_init__()"] if hasattr(record, "__post_init__") else []
    source = f"def __init__(self, {star}{', '.join(arguments)}):\n  " + "\n  ".join(
        body or ["pass"]
    )
    exec(source, defaults)
    record.__init__ = defaults["__init__"]  # type: ignore[misc]
    del record.__setattr__, record.__delattr__
