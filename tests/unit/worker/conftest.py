"""Fixtures: a group of one in the test's own process, and an end of each session's hooks."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from torch.optim import optimizer

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
    # A reducer of DDP that a test has left must not be the last one to hold the group: it would
    # wait for the group's threads with the GIL, which they may need to end.
    gc.collect()
    group.close()


@pytest.fixture(autouse=True)
def no_hooks_of_earlier_sessions() -> Iterator[None]:
    """A session's hooks on all optimizers last as long as its process, and would find that those
    of later tests step before its first loop."""
    yield
    optimizer._global_optimizer_pre_hooks.clear()
    optimizer._global_optimizer_post_hooks.clear()
