"""Every setting of a command is one of its options, with its default in the help."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from elastic.cli.main import SettingsCommand, app, with_options
from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.fields import Option, options_of
from elastic.settings.node import NodeSettings
from elastic.settings.operator import OperatorSettings
from elastic.settings.run import RunSettings
from elastic.version import __version__

RUN = [option for option in options_of(RunSettings) if not option.positional]
CLASSES = {
    "coordinator": CoordinatorSettings,
    "agent": NodeSettings,
    "status": OperatorSettings,
}
ALL = [
    pytest.param(name, option, id=f"{name}-{option.name}")
    for name, settings in CLASSES.items()
    for option in options_of(settings)
    if not (option.secret or option.positional)
]
every_option = pytest.mark.parametrize(("name", "option"), ALL)
received: dict[str, Any] = {}


def application() -> typer.Typer:
    """Commands that only store their options in `received`."""
    made = typer.Typer(rich_markup_mode=None)
    for name, settings in CLASSES.items():

        def command(**options: Any) -> None:
            received.clear()
            received.update(options)

        made.command(name, cls=SettingsCommand)(with_options(settings)(command))
    return made


APPLICATION = application()


def invoke(*arguments: str, app: typer.Typer = APPLICATION) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "400", "TERM": "dumb"})


def words(output: str) -> str:
    """The output as one line, with words rejoined that were broken at a hyphen."""
    return " ".join(re.sub(r"(?<=\w-)\n\s+", "", output).split())


def texts(output: str) -> dict[str, str]:
    """The help's text for each option, by the option's first long name."""
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=  -|\S|$)", output):
        named = re.match(r"  (?:-\w, )?(--[\w-]+)( / --[\w-]+)?( [A-Z_]+)?\s\s+", entry)
        if named:
            found[named[1]] = words(entry[named.end() :])
    return found


def told(option: Option) -> str:
    """The expected help: text and default. Without a default, the text says what applies."""
    if option.required:
        return f"{option.help} [required]"
    return option.help + (
        f" [default: {option.shown_default}]" if option.default is not None else ""
    )


@pytest.fixture(scope="module")
def parameters() -> dict[str, Any]:
    command: Any = typer.main.get_command(app)
    return {p.name: p for p in command.commands["run"].params}


@pytest.fixture(scope="module")
def help_of_run() -> dict[str, str]:
    result = invoke("run", "--help", app=app)
    assert result.exit_code == 0
    return texts(result.output)


@pytest.mark.parametrize("option", RUN, ids=lambda o: o.name)
def test_every_setting_of_a_run_has_an_option(parameters: dict[str, Any], option: Option) -> None:
    found = parameters[option.name]
    assert found.opts == [name for name in (option.short, option.flag) if name]
    assert found.help == option.help
    assert found.default is None, "other sources could not fill it in"


@pytest.mark.parametrize("option", RUN, ids=lambda o: o.name)
def test_the_help_of_run_shows_each_default(help_of_run: dict[str, str], option: Option) -> None:
    assert help_of_run[option.flag] == told(option)


def test_run_has_no_options_other_than_its_settings(parameters: dict[str, Any]) -> None:
    assert set(parameters) == {"script", "arguments", "config", *(o.name for o in RUN)}


def test_a_decorated_command_receives_the_options_by_name() -> None:
    @with_options(RunSettings)
    def command(script: str, *, config: str = "", **options: str | None) -> dict[str, str | None]:
        del script, config
        return options

    made = list(inspect.signature(command).parameters.values())
    assert [p.name for p in made] == ["script", "config", *(o.name for o in RUN)]
    assert command("s", job="digits") == {"job": "digits"}


# The other commands


@every_option
def test_every_setting_of_the_other_commands_has_an_option(name: str, option: Option) -> None:
    """typer reads an option from the command line alone, not from the environment."""
    value = [] if option.is_switch else ["value"]
    assert invoke(name, option.flag, *value).exit_code == 0
    given = {key: value for key, value in received.items() if value is not None}
    assert given == {option.name: True if option.is_switch else "value"}


@every_option
def test_the_help_of_the_other_commands_shows_each_option(name: str, option: Option) -> None:
    assert texts(invoke(name, "--help").output)[option.flag] == told(option)


@pytest.mark.parametrize("group", [(), ("checkpoint",), ("certs",)])
def test_the_summary_of_every_command_fits_into_80_columns(group: tuple[str, ...]) -> None:
    """An ordinary terminal would cut off a longer summary."""
    shown = CliRunner().invoke(app, [*group, "--help"], env={"COLUMNS": "80"}).output
    commands = re.findall(r"^  ([a-z]+) {2,}(.+)$", shown.partition("Commands:")[2], re.MULTILINE)
    assert commands
    assert all(text.endswith(".") and not text.endswith("...") for _, text in commands)


def test_each_group_of_settings_has_its_own_section_in_the_help() -> None:
    output = invoke("agent", "--help").output
    sections = re.findall(r"^(\S.*):$", output, re.MULTILINE)
    assert sections == [
        "Options",
        "Settings (also ELASTIC_* variables and --config)",
        "TLS",
        "etcd",
    ]


@pytest.mark.parametrize(("flag", "value"), [("--insecure", True), ("--no-insecure", False)])
def test_a_switch_is_true_false_or_unset(flag: str, value: bool) -> None:
    assert invoke("agent", flag).exit_code == 0
    assert received["insecure"] is value
    assert invoke("agent").exit_code == 0
    assert received["insecure"] is None


def test_a_setting_of_another_command_is_refused_with_the_right_commands() -> None:
    result = invoke("agent", "--ledger", "/l")
    assert result.exit_code == 2
    assert words(result.output).endswith(
        "--ledger is a setting of `elastic run` and `elastic coordinator`, not of `root agent`"
    )
    result = invoke("coordinator", "--no-record-samples")
    assert "--no-record-samples is a setting of `elastic agent`, not of" in words(result.output)


def test_a_password_on_the_command_line_is_refused_and_not_printed() -> None:
    result = invoke("agent", "--etcd-password=hunter2")
    assert result.exit_code == 2
    assert "--etcd-password-file, or ELASTIC_ETCD_PASSWORD" in words(result.output)
    assert "hunter2" not in result.output
    assert "etcd_password" not in received


def test_an_unknown_option_gives_the_usual_error() -> None:
    result = invoke("agent", "--xyzzy", "1")
    assert result.exit_code == 2
    assert "No such option: --xyzzy" in words(result.output)


def test_the_version_is_printed() -> None:
    result = invoke("--version", app=app)
    assert (result.exit_code, result.output) == (0, f"elastic {__version__}\n")


@pytest.mark.parametrize("command", ["run", "agent", "coordinator", "doctor", "status"])
def test_an_option_without_its_value_gives_the_error_about_the_value(command: str) -> None:
    flag = "--etcd" if command != "run" else "--nproc-per-node"
    result = CliRunner().invoke(app, [command, flag])
    assert result.exit_code == 2
    assert "requires an argument" in result.output


@pytest.mark.parametrize(
    ("name", "tables"),
    [("status", "[operator] and [job]"), ("jobs", "[operator] and [job]"), ("agent", "[job]")],
)
def test_the_help_of_config_names_the_tables_that_a_command_reads(name: str, tables: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300"}, color=False).output
    text = texts(shown.replace("<path>", "PATH"))["--config"]
    assert tables in text
    assert ("this command's name" in text) == (name == "agent")


def test_an_option_may_be_written_with_underscores() -> None:
    invoke("coordinator", "--min_workers", "3", "--keep_checkpoints=2")
    assert (received["min_workers"], received["keep_checkpoints"]) == ("3", "2")


@pytest.mark.parametrize("flag", ["--rdzv-id", "--rdzv_id", "-t"])
def test_an_option_of_torchrun_is_named_as_such(flag: str) -> None:
    told = words(invoke("run", flag, "x", "train.py", app=app).output)
    assert "`elastic torchrun`" in told
