"""The digests that members compare show every difference but those of rank-local state."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from elastic.core.data_order import DataPosition
from elastic.core.learning_rate import Ramp
from elastic.worker.group.membership import differences
from elastic.worker.state.job_state import JobState
from elastic.worker.state.shards import plan_shards
from elastic.worker.state.tensor_specs import describe
from tests.unit.worker.state.job_states import At, make, restore
from tests.unit.worker.trees import same


def change_weight(state: JobState) -> None:
    with torch.no_grad():
        state.modules()["model"].get_parameter("0.weight")[1, 1] += 1e-6


def change_moment(state: JobState) -> None:
    next(iter(state.optimizers()[0].state.values()))["exp_avg"][0, 0] += 1e-6


def change_rate(state: JobState) -> None:
    state.optimizers()[0].param_groups[0]["lr"] *= 1.5


def change_schedule(state: JobState) -> None:
    state.tracked["scheduler"].last_epoch += 1  # type: ignore[attr-defined]


def change_values(state: JobState) -> None:
    state.values["best"] = 2.0


def change_ramp(state: JobState) -> None:
    ramp = Ramp(start_factor=1.0, end_factor=2.0, start_step=0, steps=9)
    state.job = At(replace(state.progress, ramps={"0": ramp}))


def change_position(state: JobState) -> None:
    state.job = At(replace(state.progress, positions=(DataPosition(epoch=0, cursor=4),)))


CHANGES = {
    change_weight: ["model.0.weight"],
    change_moment: ["optimizer.state.0.exp_avg"],
    change_rate: ["optimizer (numbers)"],
    change_schedule: ["scheduler (numbers)"],
    change_values: ["session.state (numbers)"],
    change_ramp: ["the job's counters"],
    change_position: ["the job's counters"],
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_difference_in_replicated_state_changes_the_digest_and_is_named(
    change: Callable[[JobState], None],
) -> None:
    left, right = make(1), make(1)
    assert left.digest() == right.digest()
    assert differences(left.digests(), right.digests()) == []
    change(right)
    assert left.digest() != right.digest()
    assert differences(left.digests(), right.digests()) == CHANGES[change]


def test_rank_local_state_is_not_compared() -> None:
    left, right = make(1), make(1)
    for state, mean in ((left, 1.0), (right, 2.0)):
        state.track({"statistics": nn.Linear(1, 1).requires_grad_(False)}, rank_local=True)
        state.modules()["statistics"].get_parameter("weight").fill_(mean)
        state.modules()["model"].get_buffer("1.running_mean").fill_(mean)
    assert left.digest() == right.digest()
    assert differences(left.digests(), right.digests()) == []


def test_a_parameter_is_compared_even_if_a_buffer_is_its_transpose() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("transposed", model.weight.detach().t())
    state = JobState()
    state.track({"model": model})
    assert state.local_names(state.capture()) == {"model.transposed"}


def test_rank_local_parameters_are_not_compared() -> None:
    states = [JobState(), JobState()]
    for seed, state in enumerate(states):
        torch.manual_seed(seed)
        head = nn.Linear(2, 2).requires_grad_(bool(seed))
        state.track({"model": nn.Linear(1, 1).requires_grad_(True)})
        nn.init.ones_(state.modules()["model"].weight)
        nn.init.ones_(state.modules()["model"].bias)
        state.track({"head": head}, rank_local=True)
    left, right = states
    assert left.compared_digest() == right.compared_digest()
    assert left.compared_digests() == right.compared_digests()
    assert left.digest() == right.digest()
    assert left.digests() == right.digests()
    nn.init.zeros_(left.modules()["model"].weight)
    assert left.compared_digest() != right.compared_digest()


def test_rank_local_state_is_sent_to_other_members_like_the_rest() -> None:
    source, target = make(1), make(2)
    for state in (source, target):
        state.track({"own": nn.Linear(1, 1)}, rank_local=True)
    restore(target, source)
    assert same(
        target.tracked["own"].state_dict(),
        source.tracked["own"].state_dict(),
    )
    mean = "1.running_mean"
    assert torch.equal(
        target.modules()["model"].get_buffer(mean), source.modules()["model"].get_buffer(mean)
    )


def test_call_results_that_differ_between_members_do_not_move_the_shards() -> None:
    """Results may be each rank's predictions. Where the other members' shares of a checkpoint begin
    and end must not depend on them."""
    shares = []
    for rank, count in enumerate((3, 2)):
        state = make(1)
        state.results["0/0"] = {"predictions": torch.full((count, 7), float(rank))}
        flat = state.capture()
        shards = plan_shards(
            describe(flat.tensors), 2, state.local_names(flat), state.declared_local(flat)
        )
        shares.append(shards[rank])
    names = [{piece.name for piece in share} for share in shares]
    assert "session.results.0/0.predictions" in names[0] - names[1]
    elements = Counter[str]()
    for share in shares:
        for piece in share:
            elements[piece.name] += piece.stop - piece.start
    tensors = make(1).capture().tensors
    assert {n: elements[n] for n in tensors} == {n: t.numel() for n, t in tensors.items()}


def test_a_rank_local_gradient_on_one_member_only_does_not_change_the_saved_shapes() -> None:
    states = []
    for has_gradient in (True, False):
        own = nn.Linear(1, 1)
        if has_gradient:
            own.weight.grad = torch.ones(1, 1)
        state = make(1)
        state.track({"own": own}, rank_local=True)
        states.append(state)
    left, right = (state.saved_shapes() for state in states)
    assert left == right
    assert "session.gradients.gradients.model.0.weight" in left
    assert not any("own" in name for name in left)


def test_parameters_are_compared_by_name_without_optimizers_and_buffers() -> None:
    left, right = make(1), make(1)
    change_moment(right)
    right.modules()["model"].get_buffer("1.running_mean").fill_(9.0)
    assert left.compared_digest() == right.compared_digest()
    change_weight(right)
    assert left.compared_digest() != right.compared_digest()
    assert differences(left.compared_digests(), right.compared_digests()) == ["model.0.weight"]


def test_values_of_session_state_are_compared_by_key() -> None:
    left, right = make(1), make(1)
    for state, keys in (left, ["best", "history"]), (right, ["history", "best"]):
        state.values.update({key: [0.5, torch.ones(2)] for key in keys})
    assert left.compared_digest() == right.compared_digest()
    right.values["best"][0] = 0.25
    right.values["history"][1][0] = 2.0
    right.values["more"] = None
    assert left.compared_digest() != right.compared_digest()
    assert differences(left.compared_digests(), right.compared_digests()) == [
        "session.state['best']",
        "session.state['history']",
        "session.state['more']",
    ]


def test_buffers_in_a_kept_state_dict_may_differ() -> None:
    left, right = make(1), make(1)
    for state in (left, right):
        state.values["best"] = {"of": copy.deepcopy(state.modules()["model"].state_dict())}
    right.values["best"]["of"]["1.running_mean"].fill_(9.0)
    assert left.compared_digest() == right.compared_digest()
    right.values["best"]["of"]["0.weight"].fill_(9.0)
    assert left.compared_digest() != right.compared_digest()
