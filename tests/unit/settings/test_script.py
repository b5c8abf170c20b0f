"""The script and its arguments come from the same sources as every other setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.errors import ConfigurationError
from elastic.settings.node import NodeSettings
from elastic.settings.run import RunSettings
from elastic.settings.sources import script_of
from tests.unit.settings.loading import ETCD, load, problem

FILE = """\
[job]
script = "shared.py"
args = ["--lr", "0.1", "a b"]
[agent]
args = []
"""
ENVIRONMENT = {"ELASTIC_SCRIPT": "there.py", "ELASTIC_ARGS": "--lr 0.2 --name 'a b'"}


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "elastic.toml"
    file.write_text(FILE)
    return file


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(toml: Path) -> None:
    def found(command_line: dict[str, object], environment: dict[str, str]) -> list[str]:
        return script_of(load(RunSettings, command_line, environment, toml))

    assert found({}, {}) == ["shared.py", "--lr", "0.1", "a b"]
    assert found({}, ENVIRONMENT) == ["there.py", "--lr", "0.2", "--name", "a b"]
    here: dict[str, object] = {"script": "here.py", "args": ["-x", ""]}
    assert found(here, ENVIRONMENT) == ["here.py", "-x", ""]
    assert found({"script": "here.py"}, {}) == ["here.py", "--lr", "0.1", "a b"]


def test_the_commands_own_table_wins_over_the_shared_one(toml: Path) -> None:
    assert script_of(load(NodeSettings, ETCD, {}, toml)) == ["shared.py"]


def test_empty_arguments_in_the_environment_win_over_the_file(toml: Path) -> None:
    settings = load(RunSettings, {}, {"ELASTIC_ARGS": ""}, toml)
    assert script_of(settings) == ["shared.py"]


def test_a_missing_script_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        script_of(load(RunSettings, {}))
    assert str(caught.value) == (
        "script is missing: give SCRIPT on the command line, ELASTIC_SCRIPT in the environment, or "
        "script below [run] or [job] in the file of --config; expected a file"
    )


def test_arguments_that_are_quoted_wrongly_are_not_shown() -> None:
    told = problem(RunSettings, {}, {"ELASTIC_ARGS": "--token 'hunter2"})
    assert told == (
        "ELASTIC_ARGS (environment): the value (not shown) is not allowed; expected arguments "
        "quoted as for a shell, or an array of texts"
    )


def test_arguments_in_a_file_must_be_texts(tmp_path: Path) -> None:
    file = tmp_path / "elastic.toml"
    file.write_text('[run]\nargs = ["--lr", 0.1]\n')
    assert problem(RunSettings, {}, {}, file).endswith("or an array of texts")
