"""A fixture for tests that need DDP but no peers: a group of one in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic.core.membership import ChangeReason, Generation, Member
from elastic.worker.group.process_group import Group, StoreHost
from tests.unit.worker.together import GLOO


@pytest.fixture
def alone() -> Iterator[Group]:
    host = StoreHost("127.0.0.1")
    member = Member(worker="w0", node="n", slot=0, endpoint=host.endpoint)
    generation = Generation(
        number=1, incarnation="i", members=(member,), reason=ChangeReason.STARTED
    )
    group = Group(generation, 0, GLOO)
    group.build(host, 10.0)
    yield group
    group.close()
