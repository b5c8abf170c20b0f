"""The place in which a test's jobs run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.running import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """An empty one; it must be left so."""
    with contextlib.closing(Place(tmp_path)) as place:
        yield place
