"""`session.state` and generators are undone with a block, and filled in place when received."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.errors import ConfigurationError
from elastic.worker.state.cells import TorchGenerator
from elastic.worker.state.job_state import JobState
from tests.unit.worker.state.undoing import WIDE, Script, layer, tracking
from tests.unit.worker.trees import same


def test_default_generators_are_put_back() -> None:
    script = Script(model=layer(2))
    script.undo.begin()
    drawn = torch.rand(2)
    assert script.undo.put_back()
    assert torch.equal(torch.rand(2), drawn)


def test_a_generator_made_in_a_lost_block_starts_over_in_the_retry() -> None:
    script = Script(model=layer(2))
    script.block()
    script.undo.begin()
    noise = TorchGenerator(torch.Generator().manual_seed(1))
    script.state.track_own("session.generator.noise", noise)
    drawn = torch.rand(2, generator=noise.generator)
    assert script.undo.put_back()
    assert torch.equal(torch.rand(2, generator=noise.generator), drawn)
    script.block()
    assert not torch.equal(torch.rand(2, generator=noise.generator), drawn)


def test_objects_in_session_state_keep_their_identity_when_they_are_put_back() -> None:
    script = Script(model=layer(4))
    values = script.state.values
    losses = values.setdefault("losses", [])
    center = values.setdefault("center", torch.zeros(2))
    seen = values.setdefault("by class", {"seen": {1}, "counts": np.zeros(2)})["seen"]
    values["pair"] = ([], 1)

    def change() -> None:
        losses.append(0.5)
        center.add_(1.0)
        seen.add(2)
        values["by class"]["counts"] += 1
        values["pair"][0].append(1)

    for _ in range(2):
        assert script.lost(change)
        script.block(change)
    assert (values["losses"], values["by class"]["seen"]) == ([0.5, 0.5], {1, 2})
    assert values["losses"] is losses
    assert values["center"] is center
    assert center.tolist() == [2.0, 2.0]
    assert values["pair"] == ([1, 1], 1)


def test_putting_a_replaced_value_back_leaves_the_replacement_unchanged() -> None:
    net, script = tracking(4)
    constant = ["warm", "full"]
    script.state.values.update(phases=["none"], center=torch.zeros(4, 4))

    def change() -> None:
        script.state.values["phases"] = constant
        script.state.values["center"] = net.weight.data

    assert script.lost(change)
    assert constant == ["warm", "full"]
    assert bool(net.weight.any())


def test_received_values_fill_the_objects_that_the_script_already_holds() -> None:
    state = JobState()
    losses = state.values.setdefault("losses", [9.0, [1]])
    inner = losses[1]
    center = state.values.setdefault("center", torch.zeros(2))
    counts = state.values.setdefault("counts", {"a": np.zeros(2), "b": {3}})
    state.values["gone"] = 1
    state.values.load_state_dict(
        {
            "new": [1],
            "losses": [0.5, [2, 3], 7],
            "center": torch.ones(2),
            "counts": {"b": {4}, "a": np.ones(2)},
        }
    )
    assert list(state.values) == ["new", "losses", "center", "counts"]
    assert losses == [0.5, [2, 3], 7]
    assert state.values["losses"] is losses
    assert losses[1] is inner
    assert center.tolist() == [1.0, 1.0]
    assert list(counts) == ["b", "a"]
    assert counts["a"].tolist() == [1.0, 1.0]
    assert state.values["counts"] is counts


def test_received_values_may_differ_where_the_receiver_shared_one_object() -> None:
    state = JobState()
    both_hold, tensor = [1], torch.zeros(2, 2)
    state.values.update(a=both_hold, b=both_hold, whole=tensor, row=tensor[0])
    content = {"a": [2], "b": [3], "whole": torch.ones(2, 2), "row": torch.full((2,), 5.0)}
    state.values.load_state_dict(copy.deepcopy(content))
    assert same(state.values.state_dict(), content)


class LargeCopies(TorchDispatchMode):
    """Counts the large tensors that are cloned while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is torch.ops.aten.clone.default and args[0].numel() >= WIDE * WIDE:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_weights_added_late_to_session_state_are_soon_no_longer_copied() -> None:
    script = Script(net=layer(2))
    script.learn()
    best = torch.zeros(WIDE, WIDE)
    script.state.values["best"] = best
    script.learn()
    script.learn()
    with LargeCopies() as copies:
        for _ in range(3):
            script.block()
    assert copies.count == 0
    script.learn(lambda: best.add_(1))
    assert script.lost(lambda: best.add_(1))


def test_objects_in_a_tuple_in_session_state_keep_their_identity_when_filled() -> None:
    state = JobState()
    losses, center = [1.0], torch.zeros(2)
    state.values["both"] = pair = (losses, center, "name")
    state.values.load_state_dict({"both": ([1.0, 2.0], torch.ones(2), "name")})
    assert state.values["both"] is pair
    assert losses == [1.0, 2.0]
    assert center.tolist() == [1.0, 1.0]
    state.values.load_state_dict({"both": ([3.0], torch.ones(2), "another")})
    assert state.values["both"][0] is losses
    assert losses == [3.0]
    assert state.values["both"][2] == "another"


def test_a_session_state_value_that_cannot_be_sent_is_refused_before_a_group_is_lost() -> None:
    script = Script(model=layer(4))
    script.block()
    script.state.values["recent"] = deque([1.0])
    with pytest.raises(ConfigurationError, match=r"session\.state\.recent"):
        script.learn()
