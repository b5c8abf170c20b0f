"""Sessions begin a step before they have compared all of their state, and its script goes on."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from elastic.core.recovery import Declaration
from elastic.worker.group import membership
from elastic.worker.state import state_digests
from elastic.worker.state.digest import ReadBefore, digest_by_name
from tests.unit.worker.test_session_recovering import backward, follow
from tests.unit.worker.training_together import Peer, in_sessions, numbers

STRUCK_AT = 5  # a step whose block does not learn what changes


def with_large_state(peer: Peer, width: int = 300) -> nn.Linear:
    """Track a layer that no block changes before its last collective."""
    torch.manual_seed(0)
    wide = nn.Linear(width, width)
    peer.session.track(wide=wide)
    return wide


def test_a_place_is_declared_with_the_state_of_that_place() -> None:
    """Not with what was read before the script went on from the group before."""

    @in_sessions(2)
    def go(peer: Peer) -> None:
        wide = with_large_state(peer)
        declared: list[Declaration] = []

        def declare(group: Any, mine: Declaration) -> tuple[Declaration, ...]:
            declared.append(mine)
            return tell(group, mine)

        tell, membership.declare = membership.declare, declare
        for step in peer.session.steps(numbers(16, batch_size=1), epochs=1):
            with step:
                if step.index == STRUCK_AT and peer.session.generation == 1:
                    peer.announce(2)
                backward(peer, step)
                peer.update()
            if not step.committed:
                assert declared[-1].unread
                with torch.no_grad():
                    wide.weight.add_(1.0)  # for the first time, so the mark has no copy
                peer.announce(3)
                declared.clear()
                peer.session.run(lambda: None)
                assert {(d.begin_digest, d.commit_digest) for d in declared} == {(0, 0)}
        assert peer.session.committed == 8
        peer.seat.exchange("done")

    go()


@pytest.mark.parametrize(("width", "written"), [(300, (1, 1)), (600, ...)])
def test_a_difference_is_not_passed_over_by_a_script_that_catches_errors_of_its_optimizer(
    width: int, written: Any
) -> None:
    in_sessions(2)(functools.partial(differ, width=width, written=written))()


def differ(peer: Peer, *, width: int, written: Any) -> None:
    wide = with_large_state(peer, width)
    built = wide.weight.detach().clone()
    for step in peer.session.steps(numbers(16, batch_size=1), epochs=1):
        with step:
            if step.index == STRUCK_AT and peer.session.generation == 1:
                if peer.seat.rank == 1:
                    wide.weight.detach().numpy()[written] += 1.0  # no version shows it
                peer.announce(2)
            elif step.index == STRUCK_AT and peer.session.generation == 2:
                follow(peer, 3, 0, 1)
                with contextlib.suppress(Exception):
                    peer.optimizer.step()
            backward(peer, step)
            peer.update()
    assert peer.session.committed == 8
    assert torch.equal(wide.weight, built)
    peer.seat.exchange("done")


@in_sessions(2)
def test_what_all_members_write_while_it_is_read_is_no_difference(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block writes to a layer for the first time, before one member has read it."""
    wide = with_large_state(peer)
    written = threading.Event()

    def slowly(tensors: Mapping[str, torch.Tensor], *_: ReadBefore) -> int:
        if peer.seat.rank == 1 and any(name.startswith("wide") for name in tensors):
            assert written.wait(30.0)
        return digest_by_name(tensors)

    for step in peer.session.steps(numbers(16, batch_size=1), epochs=1):
        with step:
            if step.index == STRUCK_AT and peer.session.generation == 1:
                monkeypatch.setattr(state_digests, "digest_by_name", slowly)
                peer.announce(2)
            elif step.index == STRUCK_AT:
                with torch.no_grad():
                    wide.weight.add_(1.0)
                written.set()
                follow(peer, 3, 0, 1)
            backward(peer, step)
            peer.update()
    assert (peer.session.committed, peer.session.generation) == (8, 2)
    peer.seat.exchange("done")


def write_without_a_sign(wide: nn.Linear) -> None:
    wide.weight.detach().numpy()[1, 1] += 1.0


@in_sessions(2)
def test_what_one_member_alone_has_read_again_is_no_difference(peer: Peer) -> None:
    """What members remember of a reading may differ where something wrote without a sign."""
    wide = with_large_state(peer, 600)
    for step in peer.session.steps(numbers(32, batch_size=1), epochs=1):
        with step:
            if step.index == 9 and peer.session.generation == 1:
                peer.announce(2)
            backward(peer, step)
            peer.update()
        if step.index == 5:  # once it has been read, after four steps
            write_without_a_sign(wide)
            if peer.seat.rank == 1:
                peer.session._training._reads.before.forget()
    assert (peer.session.committed, peer.session.generation) == (16, 2)
    peer.seat.exchange("done")
