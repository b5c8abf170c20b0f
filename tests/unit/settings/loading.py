"""Loads the settings of any command as its users give them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import ConfigurationError
from elastic.settings.sources import DeviceCounts, load_settings

ETCD: Mapping[str, object] = {"etcd": "etcd:2379"}
"""The one setting that a command of many nodes requires."""


def load(
    settings: type,
    command_line: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Any:
    """Load the settings. command_line: None stands for `etcd` alone."""
    command_line = ETCD if command_line is None else command_line
    return load_settings(
        settings, command_line, environment or {}, config_file, lambda: DeviceCounts(0, 4)
    )


def problems(settings: type, *sources: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        load(settings, *sources)
    return str(raised.value).splitlines()


def problem(settings: type, *sources: Any) -> str:
    (line,) = problems(settings, *sources)
    return line
