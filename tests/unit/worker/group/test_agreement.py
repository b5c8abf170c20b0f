"""A group's members declare what they hold, and find those with another model or parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from elastic.core.recovery import Declaration
from elastic.errors import ModelMismatch
from elastic.worker.group.membership import (
    declare,
    differences,
    differing_parameters,
    explain_mismatch,
)
from elastic.worker.state.job_state import JobState
from elastic.worker.state.tensor_specs import describe
from tests.unit.worker.together import Seat, in_processes, run_together

BIG = 2**62 + 12345  # a digest does not fit a float


def declaration(rank: int) -> Declaration:
    """Return a declaration whose fields differ between ranks."""
    return Declaration(
        committed=9 - rank,
        intact=rank == 0,
        signature=BIG + rank,
        took_part=rank == 1,
        committed_in=1 + rank,
        commit_digest=2**63 - 1 - rank,
        begin_digest=BIG - rank,
        in_block=rank == 2,
        loop=3 * rank,
        runs_done=4 + rank,
        in_run=rank == 1,
    )


@in_processes(3)
def test_every_field_of_every_declaration_reaches_all_members(seat: Seat) -> None:
    declared = declare(seat.join(), declaration(seat.rank))
    assert declared == tuple(map(declaration, range(3)))
    flags = [f.name for f in dataclasses.fields(Declaration) if f.type == "bool"]
    assert all(type(getattr(d, name)) is bool for d in declared for name in flags)


@in_processes(2)
def test_the_scripts_default_device_does_not_affect_declarations(seat: Seat) -> None:
    group = seat.join()
    with torch.device("meta"):
        assert declare(group, declaration(seat.rank)) == tuple(map(declaration, range(2)))


def test_members_with_another_model_raise_what_differs_and_the_others_go_on() -> None:
    def right(seat: Seat) -> None:
        specs = describe({"model.w": torch.zeros(2, 3), "model.b": torch.zeros(2)})
        explain_mismatch(seat.join(), 1, (0, 2), specs)

    def odd(seat: Seat) -> None:
        specs = describe({"model.w": torch.zeros(2, 4), "model.b": torch.zeros(2)})
        with pytest.raises(ModelMismatch, match=r"model\.w is float32\[2, 4\] here and .*2, 3"):
            explain_mismatch(seat.join(), 1, (0, 2), specs)

    run_together(odd, right, odd)


@in_processes(2)
def test_equal_parameters_have_no_differences_and_need_no_names(seat: Seat) -> None:
    assert differing_parameters(seat.join(), BIG, dict) == {}


@in_processes(3)
def test_only_the_differing_member_learns_which_names_differ_from_rank_0(seat: Seat) -> None:
    odd = seat.rank == 1
    names = {"model.b": 1, "model.w": 3 if odd else 2, "same": BIG}
    found = differing_parameters(seat.join(), BIG + odd, lambda: names)
    assert found == {1: ["model.w"] if odd else []}


def test_differences_are_names_of_one_side_only_or_with_unequal_digests() -> None:
    assert differences({"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 4, "d": 5}) == ["a", "c", "d"]
    assert differences({"a": 1}, {"a": 1}) == []


def test_layers_that_one_member_has_built_in_another_order_are_named() -> None:
    """They have the same names and shapes, but DDP would average one with another."""

    def state(*order: str) -> JobState:
        net = nn.Module()
        for name in order:
            net.add_module(name, nn.Linear(2, 2, bias=False))
        state = JobState()
        state.track({"model": net})
        return state

    def explain(seat: Seat, mine: JobState) -> None:
        here = state("a", "b")
        assert (mine.signature() == here.signature()) == (seat.rank == 0)
        explain_mismatch(seat.join(), 0, (1,), mine.common())

    def right(seat: Seat) -> None:
        explain(seat, state("a", "b"))
        seat.exchange("done")

    def odd(seat: Seat) -> None:
        with pytest.raises(ModelMismatch, match=r"parameter 1 of model is b\.weight.* a\.weight"):
            explain(seat, state("b", "a"))
        seat.exchange("done")

    run_together(right, odd)


def test_a_member_with_another_kind_of_optimizer_is_told_of_both() -> None:
    """As where the script was changed since the job began: it could not use the others' state."""

    def state(kind: type[torch.optim.Optimizer]) -> JobState:
        net = nn.Linear(2, 2)
        state = JobState()
        state.track({"model": net, "optimizer": kind(net.parameters(), lr=0.1)})  # type: ignore[call-arg]
        return state

    def right(seat: Seat) -> None:
        explain_mismatch(seat.join(), 0, (1,), state(torch.optim.SGD).common())
        seat.exchange("done")

    def odd(seat: Seat) -> None:
        mine = state(torch.optim.AdamW)
        assert mine.signature() != state(torch.optim.SGD).signature()
        with pytest.raises(ModelMismatch, match=r"optimizer is AdamW\[\] here and SGD\[\] there"):
            explain_mismatch(seat.join(), 0, (1,), mine.common())
        seat.exchange("done")

    run_together(right, odd)
