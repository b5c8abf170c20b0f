"""Writes docs/API.md: `python -m tests.api_doc`; the freshness test uses it too."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import elastic
from elastic.worker.step import Means

TARGET = Path(__file__).parent.parent / "docs" / "API.md"
_HEAD = """\
# The API

Generated from the docstrings by `python -m tests.api_doc`.

[GUIDE.md](GUIDE.md) explains how these play together, [RECIPES.md](RECIPES.md) has scripts. Errors
are classes of `elastic.errors`. A `ConfigurationError` ends the job with exit code 78;
`StepMisused` is one.
"""
_OF_THE_LOOP = frozenset({"was_entered", "reduce_means"})
"""Of Step: what the training loop calls."""
PARTS: Sequence[tuple[type, Sequence[str]]] = (
    (elastic.Session, [name for name in vars(elastic.Session) if name[0] != "_"]),
    (elastic.Step, [n for n in vars(elastic.Step) if n[0] != "_" and n not in _OF_THE_LOOP]),
    (Means, []),
    (elastic.DataLoader, ["__len__", "steps_per_epoch"]),
    (elastic.Indexed, ["__len__", "__getitem__"]),
    (elastic.LinearScaling, []),
    (elastic.SqrtScaling, []),
    (elastic.NoScaling, []),
)
"""Each class, and those of its members that a script uses."""
_MADE_BY_SCRIPTS = {kind for kind, _ in PARTS} - {elastic.Session, elastic.Step, Means}
_COLUMNS = 100


def text() -> str:
    return "".join([_HEAD, *_function("elastic.init", elastic.init, "##"), *_classes()])


def _classes() -> Iterator[str]:
    for kind, members in PARTS:
        yield f"\n## {kind.__name__}\n\n"
        if kind in _MADE_BY_SCRIPTS:
            made = _signature(kind.__init__, f"elastic.{kind.__name__}")
            yield f"```python\n{made}\n```\n\n"
        yield f"{_prose(kind)}\n"
        for name in members:
            member = inspect.getattr_static(kind, name)
            if isinstance(member, property):
                kept = inspect.signature(_getter(member)).return_annotation
                yield f"\n### {kind.__name__}.{name}\n\n`{kept}`\n\n{_prose(member)}\n"
            else:
                yield from _function(f"{kind.__name__}.{name}", member, "###")


def _function(name: str, function: Callable[..., Any], level: str) -> Iterator[str]:
    call = _signature(function, name.rpartition(".")[2])
    yield f"\n{level} {name}\n\n```python\n{call}\n```\n\n{_prose(function)}\n"


def _signature(function: Callable[..., Any], bare: str) -> str:
    """The call of `bare`, on one line or with a line for each parameter."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "unnamed")]
    parts: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(_parameter(parameter))
    returns = signature.return_annotation
    end = f") -> {returns}" if isinstance(returns, str) and returns != "None" else ")"
    line = f"{bare}({', '.join(parts)}{end}"
    if len(line) <= _COLUMNS:
        return line
    rows = "".join(f"    {part},\n" for part in parts)
    return f"{bare}(\n{rows}{end}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    written = f"{stars}{parameter.name}: {parameter.annotation}"
    if parameter.default is parameter.empty:
        return written
    return f"{written} = {'...' if parameter.default is ... else repr(parameter.default)}"


def _getter(member: property) -> Callable[..., Any]:
    assert member.fget is not None, "a property without a getter"
    return member.fget


def _prose(documented: object) -> str:
    """The docstring; a list of attributes as a list."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    listed = False
    for number, line in enumerate(lines):
        if line == "Attributes:":
            lines[number], listed = "", True
        elif listed and (found := re.fullmatch(r"    (\w+) (\(\w+\): .*)", line)):
            lines[number] = f"- `{found[1]}` {found[2]}"
        elif listed:
            lines[number] = "  " + line.strip()
    return "\n".join(lines).replace("\n\n\n", "\n\n")


if __name__ == "__main__":
    TARGET.write_text(text())
