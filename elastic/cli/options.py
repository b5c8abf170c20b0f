"""Command-line options made from the settings, so that help, defaults and names have one source."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Optional, TypeVar

import typer

from elastic.settings.run import Option, run_options

F = TypeVar("F", bound=Callable[..., Any])


def with_run_options(function: F) -> F:
    """Replace `**options` in the signature by one option per setting of `elastic run`.

    All are texts here: elastic.settings checks them together with the other sources.
    """
    signature = inspect.signature(function, eval_str=True)
    fixed = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    made = [_parameter(option) for option in run_options()]
    parameters = [*fixed, *made]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    function.__annotations__.update({p.name: p.annotation for p in made})
    return function


def _parameter(option: Option) -> inspect.Parameter:
    shown = option.default if option.default is not None else "unset"
    declared = typer.Option(
        option.flag,
        help=option.help,
        metavar=option.name.upper(),
        show_default=str(shown),
        rich_help_panel="Settings (also ELASTIC_* variables and --config)",
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[str], declared],  # noqa: UP045 - read at run time by typer
    )
