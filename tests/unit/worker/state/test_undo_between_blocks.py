"""Changes below the last commit, or below a block that does not count, are undone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.unit.worker.state.undoing import (
    LEARNT,
    Script,
    add,
    both,
    gradients,
    layer,
    learn_by_digests,
    learnt,
    scheduled,
    step_of,
    tracking,
    trained,
    write_data,
)
from tests.unit.worker.trees import same

# ---- the commit mark


def as_of_commit(script: Script) -> Any:
    with script.undo.as_of_commit():
        return script.everything()


@pytest.mark.parametrize("learnt", [False, True])
def test_the_state_of_the_last_commit_is_available_after_a_change(learnt: bool) -> None:
    _, script, gap = scheduled()
    for _ in range(LEARNT if learnt else 1):
        script.block()
        committed = script.everything()
        assert script.undo.holds_commit
        assert not script.undo.changed_since_commit()
        gap()
        assert script.undo.changed_since_commit()
        now = script.everything()
        assert same(as_of_commit(script), committed)
        assert same(script.everything(), now)
        script.undo.begin()
        script.undo.put_back()
        assert script.undo.holds_commit
        assert same(as_of_commit(script), committed)


def test_the_commit_mark_survives_a_block_that_was_given_up() -> None:
    net, script = tracking()
    script.learn(add(net))
    committed = script.everything()
    assert script.lost(add(net))
    assert not script.undo.changed_since_commit()
    assert same(as_of_commit(script), committed)


def test_the_commit_mark_is_lost_with_an_unexpected_change_between_blocks() -> None:
    net, script = learnt()
    add(net)()
    script.undo.begin()
    assert not script.undo.holds_commit
    assert script.undo.put_back()
    script.block()
    committed = script.everything()
    add(net)()
    script.undo.begin()
    assert script.undo.holds_commit
    assert same(as_of_commit(script), committed)


def test_a_change_between_blocks_that_only_digests_show_is_copied_by_later_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learn_by_digests(monkeypatch)
    net, script = tracking()
    script.block()
    write_data(net)()
    assert not script.undo.holds_commit
    script.undo.begin()
    assert not script.undo.holds_commit
    script.reduce()
    script.end()
    committed = script.everything()
    write_data(net)()
    assert script.undo.holds_commit
    assert same(as_of_commit(script), committed)


def test_the_commit_mark_is_unavailable_as_soon_as_an_unexpected_change_is_made() -> None:
    """The group may be lost at the boundary, before the next block begins."""
    net, script = learnt()
    assert script.undo.holds_commit
    add(net)()
    assert not script.undo.holds_commit


def test_putting_state_back_does_not_count_as_a_change_between_blocks() -> None:
    net, script = tracking()
    script.learn(add(net))
    assert script.lost(add(net))
    script.undo.keep_for_retry()
    add(net)()
    script.undo.put_back_for_retry()
    assert script.undo.holds_commit
    script.undo.begin()
    assert script.undo.holds_commit
    script.block(add(net))
    add(net)()
    assert not script.undo.holds_commit  # nothing is copied at commits


def test_loading_an_earlier_model_and_optimizer_state_between_blocks_is_noticed() -> None:
    net, optimizer, script = trained(torch.optim.SGD, momentum=0.9)
    step = step_of(optimizer, net)
    script.learn(after=step)
    best = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    for _ in range(3):
        script.block(after=step)
        committed = script.everything()
        net.load_state_dict(best[0])
        optimizer.load_state_dict(copy.deepcopy(best[1]))
        if script.undo.holds_commit:
            assert same(as_of_commit(script), committed)
        script.undo.begin()
        script.undo.put_back()
    assert script.undo.holds_commit


def test_a_received_state_sets_the_commit_mark_only_if_it_was_sent_as_one() -> None:
    net, script = learnt()
    for at_commit in (False, True):
        script.undo.begin()
        script.undo.put_back()
        add(net)()
        script.undo.received(at_commit=at_commit)
        assert script.undo.holds_commit is at_commit


# ---- below a block that does not count


def test_a_first_change_below_a_void_block_is_undone() -> None:
    net, script = learnt()
    assert script.lost()
    script.below_void_block(write_data(net))


def test_changes_below_a_void_block_are_undone_when_the_step_is_handed_out_again() -> None:
    net, script, gap = scheduled()
    for _ in range(LEARNT):
        script.block(add(net))
        gap()
    assert script.lost(add(net))
    script.below_void_block(gap)
    at_begin = script.everything()
    gap()
    script.undo.put_back_for_retry()  # the copies were used: nothing is put back
    assert not same(script.everything(), at_begin)


@pytest.mark.parametrize("optimizer", ["net", "average"])
def test_a_fused_step_below_a_void_block_is_undone(optimizer: str) -> None:
    net, average = layer(), layer()
    module = {"net": net, "average": average}[optimizer]
    fused = torch.optim.Adam(module.parameters(), fused=True)
    script = Script(net=net, average=average, optimizer=fused)
    gradients(module)
    script.learn(after=fused.step)
    assert script.lost()
    script.below_void_block(both(lambda: gradients(module), fused.step))


@pytest.mark.parametrize("changed", ["requires_grad", "modes", "parameter_groups"])
def test_what_goes_along_with_a_commit_is_that_of_the_commit(changed: str) -> None:
    """Code below the block runs once more at a member that takes the commit."""
    net = layer()
    optimizer = torch.optim.SGD([net.weight], lr=0.1)
    script = Script(model=net, optimizer=optimizer)
    script.learn(after=step_of(optimizer, net))
    before = script.state.extra()
    changes = {
        "requires_grad": lambda: net.bias.requires_grad_(False),
        "modes": net.eval,
        "parameter_groups": lambda: optimizer.param_groups[0]["params"].append(net.bias),
    }
    changes[changed]()
    assert script.state.extra()[changed] != before[changed]
    assert script.undo.holds_commit
    with script.undo.as_of_commit():
        assert script.state.extra()[changed] == before[changed]
