"""Command-line options made from the settings, so that help, defaults and names have one source."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Optional, TypeVar

import typer
from typer.core import TyperCommand

from elastic.settings.commands import belongs_elsewhere, every_option
from elastic.settings.fields import Option, options_of
from elastic.settings.run import RunSettings

F = TypeVar("F", bound=Callable[..., Any])


def with_options(settings: type) -> Callable[[F], F]:
    """Replace `**options` in the signature by one option per setting of the class.

    Positional ones have parameters of their own. They are texts, or None or a truth value for
    --flag/--no-flag; `load_settings` checks them together with the other sources. Secrets have no
    option.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)
        fixed = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        made = [_parameter(option) for option in options_of(settings) if _is_option(option)]
        parameters = [*fixed, *made]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__annotations__.update({p.name: p.annotation for p in made})
        return function

    return decorate


def with_run_options(function: F) -> F:
    """`with_options` of `elastic run`."""
    return with_options(RunSettings)(function)


class SettingsCommand(TyperCommand):
    """A command that says of a setting it does not have which command has it.

    For `app.command(cls=SettingsCommand)`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As in click; the types are those of typer's own copy of it, or of click's."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            flag = getattr(error, "option_name", None)
            unknown = hasattr(error, "possibilities")  # of click's NoSuchOption alone
            told = unknown and flag and _of_another_command(flag, f"`{ctx.command_path}`")
            if not told:
                raise
            raise _UsageError(told, ctx) from None


_UsageError: Any = typer.BadParameter.__mro__[1]


def _of_another_command(flag: str, command: str) -> str | None:
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    option = every_option().get(name)
    if option is not None and option.secret:
        return (
            f"there is no {flag}, since every process on this machine could read it; give "
            f"{flag}-file, or {option.variable} in the environment"
        )
    if option is not None and option.positional:
        return (
            f"there is no {flag}; give {option.positional} after the options, or "
            f"{option.variable} in the environment"
        )
    elsewhere = belongs_elsewhere(name, command)
    return elsewhere and f"{flag} {elsewhere}"


def _is_option(option: Option) -> bool:
    return not (option.secret or option.positional)


def _parameter(option: Option) -> inspect.Parameter:
    if option.is_switch:
        names = [f"{option.flag}/{option.flag.replace('--', '--no-')}"]
    else:
        names = [option.flag]
    if option.short:
        names.insert(0, option.short)
    declared = typer.Option(
        *names,
        help=option.help,
        metavar=None if option.is_switch else option.name.upper(),
        show_default="required" if option.required else option.shown_default,
        rich_help_panel=option.group or "Settings (also ELASTIC_* variables and --config)",
    )
    kind: Any = bool if option.is_switch else str
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[kind], declared],  # noqa: UP045 - read at run time by typer
    )
