"""Every setting of a run is an option of the command, with its default in the help."""

from __future__ import annotations

import inspect

import click
import pytest
import typer
from typer.testing import CliRunner

from elastic.cli.main import app
from elastic.cli.options import with_run_options
from elastic.settings.run import Option, run_options

OPTIONS = list(run_options())


@pytest.fixture(scope="module")
def run_command() -> click.Command:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    return group.commands["run"]


@pytest.fixture(scope="module")
def help_text() -> str:
    result = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 0
    return " ".join(result.output.split())


def parameter(command: click.Command, option: Option) -> click.Option:
    (found,) = [p for p in command.params if p.name == option.name]
    assert isinstance(found, click.Option)
    return found


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.name)
def test_every_setting_has_an_option(run_command: click.Command, option: Option) -> None:
    found = parameter(run_command, option)
    assert found.opts == [option.flag]
    assert found.help is not None
    assert option.help in found.help
    assert found.default is None, "so that other sources can fill it in"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.name)
def test_the_help_shows_the_default(help_text: str, option: Option) -> None:
    shown = "unset" if option.default is None else str(option.default)
    start = help_text.index(f"{option.flag} ")
    assert f"[default: {shown}]" in help_text[start : start + 400].split(" --")[0] or (
        f"[default: ({shown})]" in help_text[start : start + 400].split(" │ │ --")[0]
    )


def test_there_are_no_other_options(run_command: click.Command) -> None:
    names = {p.name for p in run_command.params if isinstance(p, click.Option)}
    assert names - {o.name for o in OPTIONS} == {"config"}


def test_what_is_decorated_receives_them_by_name() -> None:
    @with_run_options
    def command(script: str, *, config: str = "", **options: str | None) -> dict[str, str | None]:
        del script, config
        return options

    made = list(inspect.signature(command).parameters.values())
    assert [p.name for p in made] == ["script", "config", *(o.name for o in OPTIONS)]
    assert command("s", job="digits") == {"job": "digits"}
