"""The place in which a test's jobs run, and an etcd for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster, etcd_cluster
from tests.integration.running import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """An empty one; it must be left so."""
    with contextlib.closing(Place(tmp_path)) as place:
        yield place


@pytest.fixture
def etcd() -> Iterator[EtcdCluster]:
    """An empty one, of one member."""
    with etcd_cluster(size=1) as cluster:
        yield cluster
