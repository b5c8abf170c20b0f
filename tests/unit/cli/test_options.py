"""Every setting of a run is an option of the command, with its default in the help."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from elastic.cli.main import app
from elastic.cli.options import with_run_options
from elastic.settings.run import Option, run_options

OPTIONS = list(run_options())


@pytest.fixture(scope="module")
def parameters() -> dict[str, Any]:
    """The parameters of `elastic run`, by name."""
    command: Any = typer.main.get_command(app)
    return {p.name: p for p in command.commands["run"].params}


@pytest.fixture(scope="module")
def help_lines() -> list[str]:
    result = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 0
    return result.output.splitlines()


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.name)
def test_every_setting_has_an_option(parameters: dict[str, Any], option: Option) -> None:
    found = parameters[option.name]
    assert found.opts == [option.flag]
    assert found.help == option.help
    assert found.default is None, "other sources could not fill it in"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.name)
def test_the_help_shows_the_default(help_lines: list[str], option: Option) -> None:
    shown = "unset" if option.default is None else option.default
    (line,) = [line for line in help_lines if f"{option.flag} " in line[:40]]
    assert f"{option.help} [default: ({shown})]" in line


def test_there_are_no_other_options(parameters: dict[str, Any]) -> None:
    assert set(parameters) == {"script", "arguments", "config", *(o.name for o in OPTIONS)}


def test_what_is_decorated_receives_them_by_name() -> None:
    @with_run_options
    def command(script: str, *, config: str = "", **options: str | None) -> dict[str, str | None]:
        del script, config
        return options

    made = list(inspect.signature(command).parameters.values())
    assert [p.name for p in made] == ["script", "config", *(o.name for o in OPTIONS)]
    assert command("s", job="digits") == {"job": "digits"}
