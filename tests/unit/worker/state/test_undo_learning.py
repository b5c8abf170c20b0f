"""What blocks change is learnt: only that is copied, and a change never seen before is told of."""

from __future__ import annotations

import pytest
import torch

from tests.unit.worker.state.undoing import (
    Script,
    add,
    both,
    layer,
    learnt,
    nothing,
    step_of,
    tracking,
    trained,
    write_data,
)


def test_what_changes_after_the_last_collective_alone_is_not_copied() -> None:
    net, optimizer, script = trained(torch.optim.AdamW)
    script.learn(after=step_of(optimizer, net))
    assert script.told == []
    assert script.lost()


@pytest.mark.parametrize(("kind", "copies"), [("SGD", 2), ("Adam", 3)])
def test_a_costly_copy_is_told_of_once_with_names_and_size(kind: str, copies: int) -> None:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    net, optimizer, script = trained(getattr(torch.optim, kind), 600, **options)
    script.learn(step_of(optimizer, net))
    parameters = sum(p.numel() * 4 for p in net.parameters())
    ((names, size),) = script.told
    assert names == ["model", "optimizer"]
    assert copies * parameters <= size <= copies * parameters + 8  # Adam counts its steps, too
    assert 0 < script.copying_s[0] < 10


def test_a_collective_after_the_optimizers_step_is_learnt_from() -> None:
    """It begins unknown to the session; the group's counter tells of it."""
    net, optimizer, script = trained(torch.optim.AdamW, fused=True)

    def log_the_loss() -> None:
        script.collectives += 1

    after = both(step_of(optimizer, net), log_the_loss)
    script.learn(after=after)
    assert script.lost(after=after)


@pytest.mark.parametrize("change", ["in place", "fused", "data"])
def test_a_change_that_was_never_seen_before_is_not_undone_and_that_is_said(change: str) -> None:
    net, optimizer, script = trained(torch.optim.AdamW, fused=True)
    script.learn(after=step_of(optimizer, net))
    changes = {
        "in place": add(net),
        "fused": step_of(optimizer, net),
        "data": lambda: setattr(net.weight, "data", net.weight.data + 1.0),
    }
    assert not script.lost(changes[change])


def test_a_change_seen_once_is_undone_from_the_next_block_on() -> None:
    net, script = learnt()
    script.block(add(net))
    assert script.lost(add(net))


def test_a_surprise_is_forgotten_with_the_block_that_counted() -> None:
    net, script = learnt()
    assert not script.lost(add(net), nothing)
    script.block(add(net))
    assert script.lost(add(net))


def test_a_change_that_no_sign_shows_is_learnt_about_later() -> None:
    """Writes through `.data` that begin in mid-run show in the next block that is compared."""
    net, script = learnt()
    for _ in range(16):
        script.block(write_data(net))
    assert script.lost(write_data(net))


def test_what_is_tracked_later_is_learnt_about_from_its_first_block() -> None:
    net, late = layer(), layer()
    script = Script(model=net)
    script.learn(add(net))
    script.state.track({"late": late})
    assert script.lost(write_data(late))
    script.learn(both(add(net), write_data(late)))
    assert script.lost(both(add(net), write_data(late)))


def test_after_many_blocks_it_learns_again() -> None:
    net, script = tracking()
    for _ in range(512):
        script.block()
    assert script.lost(write_data(net))
