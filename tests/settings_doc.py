"""Writes docs/SETTINGS.md: `python -m tests.settings_doc`; the freshness test uses it too."""

from __future__ import annotations

from pathlib import Path

from elastic.settings.run import SettingDescription, describe_run_settings

TARGET = Path(__file__).parent.parent / "docs" / "SETTINGS.md"
_HEAD = """\
# Settings of `elastic run`

Generated from `elastic/settings/run.py` by `python -m tests.settings_doc`.

What is given first in this list wins: an option of the command, an environment variable, the
`[run]` table of the TOML file given with `--config` (or `ELASTIC_CONFIG`), the default. A key of
the TOML file is the option's name with underscores: `--max-restarts` is `max_restarts`.

| option | variable | default | |
|---|---|---|---|
"""


def text() -> str:
    """The whole document."""
    return _HEAD + "".join(_row(setting) for setting in describe_run_settings())


def _row(setting: SettingDescription) -> str:
    option = "--" + setting.name.replace("_", "-")
    default = "unset" if setting.default is None else f"`{setting.default}`"
    return f"| `{option}` | `{setting.environment_name}` | {default} | {setting.help} |\n"


if __name__ == "__main__":
    TARGET.write_text(text())
