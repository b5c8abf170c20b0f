"""Fixtures: the place where a test's jobs run, and an etcd for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster, etcd_cluster
from tests.integration.running import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """An empty place. It fails the test that leaves processes or run directories in it."""
    with contextlib.closing(Place(tmp_path)) as place:
        yield place


@pytest.fixture
def etcd() -> Iterator[EtcdCluster]:
    """An empty etcd with one member."""
    with etcd_cluster(size=1) as cluster:
        yield cluster
