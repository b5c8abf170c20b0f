"""An optimizer that steps must be tracked, directly or in the state of a tracked object. A scaling
factor applies to its learning rates during its steps only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic.core.learning_rate import LinearScaling, SqrtScaling, retarget
from elastic.errors import CheckpointMismatch, StepMisused
from elastic.worker.optimizers import Optimizers, ScaledOptimizer, require_same_kind
from elastic.worker.state.job_state import JobState, Values
from elastic.worker.state.signs import steps_of


class Holder:
    """Wraps an optimizer, as Lookahead and SAM do. whole: its state includes the optimizer's."""

    def __init__(self, inner: torch.optim.Optimizer, *, whole: bool) -> None:
        self.inner, self.whole = inner, whole

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()} if self.whole else {"k": 5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.whole:
            self.inner.load_state_dict(state["inner"])


class InAList(Holder):
    """A holder that keeps its optimizer in nested containers."""

    def __init__(self, inner: torch.optim.Optimizer, *, whole: bool) -> None:
        super().__init__(inner, whole=whole)
        self.__dict__ = {"whole": whole, "deep": {"list": [inner]}}

    def state_dict(self) -> dict[str, Any]:
        inner = self.__dict__["deep"]["list"][0]
        return {"inner": inner.state_dict()} if self.whole else {}


def stepped() -> torch.optim.Optimizer:
    """Return an optimizer that has stepped once and keeps a momentum."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.step()
    return optimizer


def module_of(optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    """Return a module of the parameters that the optimizer trains."""
    return torch.nn.ParameterList(p for group in optimizer.param_groups for p in group["params"])


def checked(optimizer: torch.optim.Optimizer, /, **tracked: Any) -> None:
    state = JobState()
    state.track({"model": module_of(optimizer), **tracked})
    Optimizers(state).stepped(optimizer)


def test_a_tracked_optimizer_may_step() -> None:
    optimizer = stepped()
    checked(optimizer, optimizer=optimizer)


def test_an_optimizer_that_is_not_tracked_is_refused_by_its_class_name() -> None:
    with pytest.raises(StepMisused, match=r"SGD.*session\.track"):
        checked(stepped(), optimizer=stepped())


def test_tracking_a_scheduler_does_not_track_its_optimizer() -> None:
    """A scheduler's state does not include its optimizer's."""
    optimizer = stepped()
    with pytest.raises(StepMisused, match="SGD"):
        checked(optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))


@pytest.mark.parametrize("kind", [Holder, InAList])
def test_an_optimizer_inside_a_tracked_object_must_be_in_its_state(kind: type[Holder]) -> None:
    optimizer = stepped()
    checked(optimizer, sam=kind(optimizer, whole=True))
    with pytest.raises(StepMisused, match=r"inside of sam.*sam_inner"):
        checked(optimizer, sam=kind(optimizer, whole=False))


def test_an_inner_optimizer_without_state_may_be_missing_in_its_holders_state() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    optimizer.step()
    checked(optimizer, sam=Holder(optimizer, whole=False))


def test_every_step_of_an_optimizer_is_counted() -> None:
    optimizer = stepped()
    state = JobState()
    state.track({"model": module_of(optimizer), "optimizer": optimizer})
    optimizers = Optimizers(state)
    before = steps_of(optimizer)  # hooks of other tests' sessions stay and count too
    for _ in range(3):
        optimizers.stepped(optimizer)
    optimizers.count(optimizer)
    assert steps_of(optimizer) == before + 4


def test_a_new_optimizer_with_the_id_of_a_deleted_one_is_checked() -> None:
    state = JobState()
    kept = stepped()
    state.track({"model": module_of(kept), "optimizer": kept})
    optimizers = Optimizers(state)
    optimizers.stepped(kept)
    for _ in range(50):
        with pytest.raises(StepMisused):
            optimizers.stepped(stepped())


def test_the_parameters_of_an_optimizer_must_be_tracked_too() -> None:
    optimizer = stepped()
    state = JobState()
    state.track({"optimizer": optimizer})
    with pytest.raises(StepMisused, match=r"SGD trains 1 of its 1 parameters \(of shapes \(3,\)\)"):
        Optimizers(state).stepped(optimizer)


def test_parameters_may_be_tracked_in_an_object_that_is_not_a_module() -> None:
    optimizer = stepped()
    parameter = optimizer.param_groups[0]["params"][0]
    state = JobState()
    state.track({"optimizer": optimizer, "values": Values(weight=parameter)})
    assert Optimizers(state).stepped(optimizer)


def test_parameters_added_to_an_optimizer_later_are_checked() -> None:
    optimizer = stepped()
    state = JobState()
    state.track({"model": module_of(optimizer), "optimizer": optimizer})
    optimizers = Optimizers(state)
    assert optimizers.stepped(optimizer)
    assert not optimizers.stepped(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(StepMisused, match="trains 1 of its 2 parameters"):
        optimizers.stepped(optimizer)


def one_parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return parameter


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_the_factor_scales_the_step_and_not_the_visible_rate() -> None:
    parameter = one_parameter()
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    ScaledOptimizer(optimizer, lambda: 3.0)
    optimizer.step()
    assert parameter.item() == -1.5
    assert rates(optimizer) == [0.5]


def test_each_parameter_group_is_scaled_from_its_own_rate() -> None:
    first, second = one_parameter(), one_parameter()
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups)
    ScaledOptimizer(optimizer, lambda: 2.0)
    optimizer.step()
    assert (first.item(), second.item()) == (-1.0, -0.5)
    assert rates(optimizer) == [0.5, 0.25]


def test_schedulers_see_the_unscaled_rate() -> None:
    """Otherwise a scheduler that multiplies the present rate would compound the factor."""
    plain = torch.optim.SGD([one_parameter()], lr=1.0)
    scaled = torch.optim.SGD([one_parameter()], lr=1.0)
    ScaledOptimizer(scaled, lambda: 7.0)
    schedulers = [
        torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.5)
        for optimizer in (plain, scaled)
    ]
    for _ in range(3):
        for optimizer, scheduler in zip((plain, scaled), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        assert rates(scaled) == rates(plain)


@pytest.mark.parametrize("shared", [False, True])
def test_a_tensor_learning_rate_stays_the_same_tensor(shared: bool) -> None:
    """Captured graphs read it. Groups without a rate of their own share one tensor in torch."""
    first, second = one_parameter(), one_parameter()
    rate = torch.tensor(0.5)
    own = {} if shared else {"lr": torch.tensor(0.25)}
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], **own}], lr=rate)
    before = [group["lr"] for group in optimizer.param_groups]
    ScaledOptimizer(optimizer, lambda: 3.0)
    for _ in range(2):
        optimizer.step()
    assert (first.item(), second.item()) == (-3.0, -3.0 if shared else -1.5)
    assert rates(optimizer) == [0.5, 0.5 if shared else 0.25]
    after = [group["lr"] for group in optimizer.param_groups]
    assert all(a is b for a, b in zip(before, after, strict=True))


class Failing(torch.optim.SGD):
    """An optimizer whose step raises, as when the group is lost during it."""

    fails = True

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if self.fails:
            raise RuntimeError("lost")
        super().step(closure)  # type: ignore[arg-type]


def test_restore_puts_the_rates_back_after_a_step_that_raised() -> None:
    optimizer = Failing([one_parameter()], lr=0.5)
    scaled = ScaledOptimizer(optimizer, lambda: 3.0)
    with pytest.raises(RuntimeError, match="lost"):
        optimizer.step()
    scaled.restore()
    assert rates(optimizer) == [0.5]
    scaled.restore()
    assert rates(optimizer) == [0.5]


def test_a_script_that_goes_on_after_an_error_does_not_compound_the_factor() -> None:
    parameter = one_parameter()
    optimizer = Failing([parameter], lr=0.5)
    ScaledOptimizer(optimizer, lambda: 3.0)
    with pytest.raises(RuntimeError, match="lost"):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    assert parameter.item() == -1.5
    assert rates(optimizer) == [0.5]


def test_the_factor_is_evaluated_at_each_step() -> None:
    parameter = one_parameter()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    factors = iter([1.0, 2.0, 4.0])
    ScaledOptimizer(optimizer, lambda: next(factors))
    for _ in range(3):
        optimizer.step()
    assert parameter.item() == -7.0


def test_the_factor_ramps_from_its_present_value_to_the_target() -> None:
    ramp = retarget(None, LinearScaling(warmup_steps=10), 3.0, step=5)
    assert [ramp.factor(step) for step in (5, 10, 15, 100)] == [1.0, 2.0, 3.0, 3.0]
    later = retarget(ramp, SqrtScaling(warmup_steps=2), 4.0, step=10)
    assert [later.factor(step) for step in (10, 11, 12)] == [2.0, 2.0, 2.0]
    back = retarget(ramp, LinearScaling(warmup_steps=2), 1.0, step=10)
    assert [back.factor(step) for step in (10, 11, 12)] == [2.0, 1.5, 1.0]
    assert retarget(ramp, LinearScaling(warmup_steps=10), 3.0, step=8) is ramp


# ---- a checkpoint of another optimizer

KINDS = [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad]


def made(kind: Any, **options: Any) -> Any:
    return kind([nn.Parameter(torch.ones(1))], lr=0.1, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_only_a_checkpoint_of_another_kind_of_optimizer_is_refused(kind: Any, other: Any) -> None:
    """With torch's load_state_dict() the first step raises KeyError: 'momentum'."""
    tracked, states = {"opt": made(kind)}, {"opt": made(other).state_dict()}
    if kind is other:
        require_same_kind(tracked, states)
        return
    with pytest.raises(CheckpointMismatch, match=rf"track\(opt=.*this {kind.__name__} has"):
        require_same_kind(tracked, states)


def test_a_checkpoint_of_the_same_kind_may_have_more_or_fewer_hyperparameters() -> None:
    """Schedulers add some, and newer versions of torch."""
    optimizer = made(torch.optim.Adam)
    older, newer = optimizer.state_dict(), optimizer.state_dict()
    del older["param_groups"][0]["amsgrad"]
    newer["param_groups"][0]["initial_lr"] = 0.1
    for state in (older, newer):
        require_same_kind({"opt": optimizer}, {"opt": state})


def test_adamw_takes_over_the_state_of_adam() -> None:
    optimizer, adam = made(torch.optim.AdamW, weight_decay=0.5), made(torch.optim.Adam)
    require_same_kind({"opt": optimizer}, {"opt": adam.state_dict()})
    optimizer.load_state_dict(adam.state_dict())
    (group,) = optimizer.param_groups
    assert group.get("decoupled_weight_decay", True)


def test_what_has_no_parameter_groups_is_not_compared() -> None:
    """Objects of the script's own may have any state."""
    tracked = {"holder": Holder(made(torch.optim.SGD), whole=True), "opt": made(torch.optim.SGD)}
    require_same_kind(tracked, {"holder": {"inner": 1}, "opt": [1]})
