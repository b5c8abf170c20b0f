"""Any value that users give is accepted, or refused with an error that says why."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import ConfigurationError
from elastic.settings.commands import COMMANDS, TABLES, Command, every_option, options_by_name
from elastic.settings.fields import Option
from elastic.settings.limits import MAX_COUNT, MAX_SECONDS
from tests.unit.settings.loading import load

every_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.table)
NAMES = sorted(every_option())
VALUES = st.sampled_from(
    [
        *("", " ", "0", "1", "-1", "2.5", "nan", "inf", "-inf", "1e308", "1e400", "auto", "gpu"),
        *(
            "true",
            "false",
            "1" + "0" * 30,
            "9" * 5000,
            "1:",
            ":1",
            "2:1",
            "1:1",
            "host:1",
            "h:99999",
        ),
        *("\udcff", "\0", "a\nb", "\x1b[2J", "[::1]:1", "0.0.0.0:1", "http://h", "'", '"', "\\"),
        *("٣", "1_000", "0x10", "a" * 400, "unix:/x", "live", "json", "rank0", "s3://b/p", ","),
    ]
) | st.text(max_size=6)
"""Texts for the command line and the environment, which may hold bytes that are not UTF-8."""
_TOML_VALUES = st.sampled_from(
    [
        *("1", "-1", "0.5", "nan", "inf", "true", '""', '"x"', "[]", "[1]", '["a:1"]', "{}"),
        *("{a=1}", "1979-05-27", "07:32:00", "1" + "0" * 400, "9" * 5000, "1e999", '"\\u0000"'),
        *(
            "0x" + "f" * 40,
            "0x" + "f" * 5000,
            "[0x" + "f" * 5000 + "]",
            "[" * 3000 + "]" * 3000,
            '"""',
            "'a\nb'",
            '"\\ud800"',
            "=",
            "",
        ),
    ]
)


def loaded(command: Command, given: Mapping[str, str], *sources: Any) -> None:
    """Assert that timeouts and messages can hold each value that is accepted."""
    try:
        found = load(command.settings, given, *sources)
    except ConfigurationError as error:
        lines = str(error).splitlines()
        assert lines
        assert all(len(line) > 10 for line in lines)
        return
    for name, option in options_by_name(command).items():
        if isinstance(getattr(found, name, None), str | Path):
            assert "\0" not in str(getattr(found, name)).encode().decode(), option
        value = getattr(found, name, None)
        if isinstance(value, float):
            assert math.isfinite(value), option
            assert value <= MAX_SECONDS, option
        elif type(value) is int:
            assert value <= MAX_COUNT, option


def _plausible(option: Option) -> bool:
    return not option.secret


@every_command
@settings(max_examples=3 * settings.default.max_examples)
@given(data=st.data())
def test_any_option_and_variable_loads_or_is_refused(command: Command, data: st.DataObject) -> None:
    own = [name for name, option in options_by_name(command).items() if _plausible(option)]
    given_options = data.draw(st.dictionaries(st.sampled_from(own), VALUES, max_size=3))
    spelled = st.sampled_from([every_option()[name].variable for name in NAMES])
    variables = spelled | st.text(max_size=8).map("ELASTIC_".__add__)
    values = VALUES.filter(lambda value: "\0" not in value)  # no environment can hold NUL
    environment = data.draw(st.dictionaries(variables, values, max_size=3))
    environment.pop("ELASTIC_CONFIG", None)
    loaded(
        command, {"etcd": "h:1"} | given_options if "etcd" in own else given_options, environment
    )


_LINES = st.one_of(
    st.sampled_from([f"[{table}]" for table in TABLES] + ["[[job]]", "[other]", "[job.a]"]),
    st.builds("{} = {}".format, st.sampled_from([*NAMES, "a", "a-b", '"\\u0000"']), _TOML_VALUES),
    st.builds("{} = {}".format, st.sampled_from(TABLES), _TOML_VALUES),
    st.text(max_size=12),
)


def _as_bytes(text: str) -> bytes:
    return text.encode(errors="replace")


@every_command
@settings(max_examples=3 * settings.default.max_examples)
@given(content=st.lists(_LINES, max_size=6).map("\n".join).map(_as_bytes) | st.binary(max_size=30))
def test_any_file_loads_or_is_refused(command: Command, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(content)
        file.flush()
        own = options_by_name(command)
        loaded(command, {"etcd": "h:1"} if "etcd" in own else {}, {}, Path(file.name))
