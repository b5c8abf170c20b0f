"""Schedulers, averages and other modules that change and are not tracked are found and named."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel

from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.state.job_state import JobState
from elastic.worker.state.untracked import Untracked
from tests.unit.worker.training_together import Peer, in_sessions, numbers

Update = Callable[[], Any]


class Script:
    """A model in training, as a script has it, and what is told of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.model = DistributedModel(self.net, {})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.told: list[str] = []
        self.state = JobState()
        self.state.track({"model": self.model, "optimizer": self.optimizer})
        self.untracked = Untracked(self.state, lambda names, _: self.told.append(names))

    def run(self, each: Update = lambda: None, *, steps: int = 6) -> list[str]:
        """Train; return what was told."""
        for _ in range(steps):
            if self.untracked.step_begins():
                self.untracked.look()
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 3)).square().mean().backward()
            self.optimizer.step()
            each()
        return self.told


@pytest.fixture(scope="module", autouse=True)
def without_objects_of_other_tests() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def script() -> Script:
    gc.collect()
    return Script()


def averaged(script: Script) -> tuple[Any, Update]:
    average = AveragedModel(script.model)
    return average, lambda: average.update_parameters(script.model)


class Net(nn.Sequential):
    """The script's own class."""


def moving(script: Script) -> tuple[Any, Update]:
    """A copy of the module, which the script itself averages."""
    average = Net(*copy.deepcopy(script.net))

    def update() -> None:
        for mine, theirs in zip(average.parameters(), script.net.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.5)  # this moves no version

    return average, update


class Normaliser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))


def normaliser(_: Script) -> tuple[Any, Update]:
    made = Normaliser()
    return made, lambda: made.get_buffer("mean").add_(1)


def scheduler(script: Script) -> tuple[Any, Update]:
    return StepLR(script.optimizer, 5), lambda: None  # it steps at the end of an epoch


def plateau(script: Script) -> tuple[Any, Update]:
    return ReduceLROnPlateau(script.optimizer), lambda: None


def chained(script: Script) -> tuple[Any, Update]:
    parts = [StepLR(script.optimizer, 5), StepLR(script.optimizer, 7)]
    return ChainedScheduler(parts), lambda: None


def scaler(_: Script) -> tuple[Any, Update]:
    return torch.amp.GradScaler("cpu"), lambda: None


KINDS = {
    averaged: "AveragedModel",
    moving: "Net",
    normaliser: "Normaliser",
    scheduler: "StepLR",
    plateau: "ReduceLROnPlateau",
    chained: "ChainedScheduler",
    scaler: "GradScaler",
}
kinds = pytest.mark.parametrize(("make", "name"), KINDS.items(), ids=KINDS.values())


@kinds
def test_an_object_that_changes_is_named_once(
    script: Script, make: Callable[[Script], tuple[Any, Update]], name: str
) -> None:
    held, update = make(script)
    assert script.run(update) == [name]
    del held


class Adapter:
    """Tracks what a script keeps in variables of a function."""

    def __init__(self, read: Update) -> None:
        self.state_dict = read

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held[0]["item"].state_dict()

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "by"),
    [
        *((make, "itself") for make in KINDS),
        *((make, by) for make in (averaged, scheduler) for by in ("a holder", "a closure")),
    ],
)
def test_a_tracked_object_is_not_named(
    script: Script, make: Callable[[Script], tuple[Any, Update]], by: str
) -> None:
    held, update = make(script)
    ways = {"itself": held, "a holder": Holder([{"item": held}])}
    ways["a closure"] = Adapter(lambda: held.state_dict())
    script.state.track({"held": ways[by]})
    assert script.run(update) == []


def test_a_module_whose_state_is_in_the_scripts_values_is_not_named(script: Script) -> None:
    held, update = moving(script)
    script.state.values["held"] = held.state_dict()
    assert script.run(update) == []


def frozen(script: Script) -> tuple[Any, Update]:
    return copy.deepcopy(script.net), lambda: None


def renewed(script: Script) -> tuple[Any, Update]:
    """A copy that every second step is evaluated."""
    held, steps = copy.deepcopy(script.net), iter(range(99))
    state = script.net.state_dict
    return held, lambda: next(steps) % 2 or held.load_state_dict(state())


def made_anew(script: Script) -> tuple[Any, Update]:
    kept: list[Any] = []

    def update() -> None:
        kept.clear()  # the next one may have the id of this one
        kept.append(copy.deepcopy(script.net))

    return kept, update


class Around(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


def around(script: Script) -> tuple[Any, Update]:
    """The tracked model changes, the teacher does not."""
    return Around(script.model, copy.deepcopy(script.net)), lambda: None


class Metric(nn.Module):
    """Keeps its state as torchmetrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())
        self.values: list[float] = []

    def update(self) -> None:
        self.total = self.total + 1
        self.values.append(1.0)


def metric(_: Script) -> tuple[Any, Update]:
    made = Metric()
    return made, made.update


def of_another(_: Script) -> tuple[Any, Update]:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    made = StepLR(optimizer, 1)
    return made, lambda: (optimizer.step(), made.step())


def disabled(_: Script) -> tuple[Any, Update]:
    return torch.amp.GradScaler("cpu", enabled=False), lambda: None


@pytest.mark.parametrize("make", [frozen, renewed, made_anew, around, metric, of_another, disabled])
def test_objects_of_ordinary_scripts_are_not_named(
    script: Script, make: Callable[[Script], tuple[Any, Update]]
) -> None:
    held, update = make(script)
    assert script.run(update) == []
    del held


class Odd(Normaliser):
    """Raises an error if code of its class runs."""

    calls = 0

    def _called(self, *_: Any, **__: Any) -> Any:
        Odd.calls += 1
        raise AssertionError("the search ran code of the script")

    named_modules = modules = children = parameters = buffers = state_dict = _called
    __getattr__ = __eq__ = __hash__ = __bool__ = __len__ = __iter__ = _called
    __class__ = property(_called)  # type: ignore[assignment]


def test_no_code_of_the_script_runs(script: Script) -> None:
    odd = Normaliser()
    object.__setattr__(odd, "__class__", Odd)
    buffer = vars(odd)["_buffers"]["mean"]
    assert script.run(lambda: buffer.add_(1)) == ["Odd"]
    assert Odd.calls == 0


def test_nothing_is_kept_alive(script: Script) -> None:
    held, update = averaged(script)
    seen = weakref.ref(held)
    script.run(update, steps=4)
    gc.disable()
    try:
        del held, update
        assert seen() is None
    finally:
        gc.enable()
    assert script.run() == []


def in_steps(peer: Peer) -> None:
    scheduler = StepLR(peer.optimizer, 1, gamma=1.0)
    for step in peer.session.steps(numbers(16, batch_size=1), epochs=1):
        with step:
            for (inputs,) in step.batches():
                step.backward(peer.model(inputs).mean())
            peer.update()
            scheduler.step()
    assert peer.session._training._untracked is None


@in_sessions(2)
def test_rank_0_reports_it_as_an_event(peer: Peer) -> None:
    in_steps(peer)
    notices = peer.control.reports.notices
    found = [fields["names"] for name, fields in notices if name == "untracked_state"]
    assert found == (["StepLR"] if peer.session.rank == 0 else [])
