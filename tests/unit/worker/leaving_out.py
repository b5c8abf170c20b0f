"""Trains two models in several processes, one of which leaves out or repeats a part of a step."""

from __future__ import annotations

import ast
import hashlib
import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic.errors import StepMisused
from elastic.worker import training as training_module
from elastic.worker.data_loader import DataLoader
from elastic.worker.group import membership as membership_module
from elastic.worker.group.process_group import Group
from elastic.worker.session import Session
from elastic.worker.step import Step
from elastic.worker.training import Training
from tests.unit.worker.together import Seat, run_together
from tests.unit.worker.training_together import PeerControl

STEPS = 14
_FEATURES = 6
_QUICK_S = 0.05  # instead of half a second, for members that wait for each other
_HANG_S = 6.0  # after which a coordinator would form another group


class Ended(SystemExit):
    """The job has ended because another member's script was refused."""


class OneGroup(PeerControl):
    """A control for a job that ends with its first group."""

    joined = False

    def join(self) -> Group:
        if self.joined:
            raise Ended
        self.joined = True
        return super().join()


class Job:
    """One member: two models that train one after the other in each step."""

    def __init__(self, seat: Seat, options: dict[str, Any]) -> None:
        self.control = OneGroup(seat)
        self.session = Session(Training(self.control))
        torch.manual_seed(1)
        self.nets = [nn.Sequential(nn.Linear(_FEATURES, 3), nn.Linear(3, 3)) for _ in range(2)]
        for net in self.nets:
            net[1].bias.requires_grad_(False)
        self.head = nn.Linear(_FEATURES, 2).double()
        self.models = [self.session.distribute(net.double(), **options) for net in self.nets]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in self.models]
        names = ("first", "second")
        self.session.track(**dict(zip(names, self.models, strict=True)))
        self.session.track(**{f"of_{n}": o for n, o in zip(names, self.optimizers, strict=True)})
        self.control.membership.announce(seat.generation(1))

    def loss(self, number: int, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.models[number](inputs).square().mean()
        return loss

    def parameters(self, number: int) -> torch.Tensor:
        return torch.stack([p.sum() for p in self.models[number].parameters()]).sum()

    def digest(self) -> str:
        return hashlib.sha256(
            b"".join(p.detach().numpy().tobytes() for net in self.nets for p in net.parameters())
        ).hexdigest()


Part = Callable[[Job, Step, torch.Tensor, int, float], "torch.Tensor | None"]
"""The loss of a model in the odd step on the odd rank; None: no backward pass of it."""


def _parameters(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    del step, inputs
    return job.parameters(number) * factor


def _head(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    del step, number
    return job.head(inputs).mean() * factor


def _outputs(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    del step, factor
    return (job.models[number](inputs) * 0).sum()


def _detached(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    del step
    with torch.no_grad():
        outputs = job.models[number](inputs)
    return outputs.sum() * factor + job.parameters(number) * factor


def _twice(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    step.backward(job.loss(number, inputs) * factor)
    return job.loss(number, inputs)


def _two_backward(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    loss = job.loss(number, inputs)
    step.backward(loss * factor, retain_graph=True)
    return loss


def _by_hand(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    del step
    dist.all_reduce(torch.zeros(30, dtype=torch.float64))
    return job.loss(number, inputs) * factor


def _other(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    """It has as many reductions, of the same sizes."""
    del step, factor
    return job.loss(1 - number, inputs)


def _once_more(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    step.backward(job.loss(number, inputs))
    (job.loss(number, inputs) * factor).backward()  # type: ignore[no-untyped-call]


def _before(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    del step
    (job.loss(number, inputs) * factor).backward()  # type: ignore[no-untyped-call]
    return job.loss(number, inputs)


def _frozen(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    """Another bias of the same size is trained."""
    del factor
    first, last = job.nets[number][0].bias, job.nets[number][1].bias
    first.requires_grad_(False)
    last.requires_grad_(True)
    step.backward(job.loss(number, inputs))
    first.requires_grad_(True)
    last.requires_grad_(False)


def _looks(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    del step, factor
    job.loss(number, inputs)
    return (job.models[number](inputs) * 0).sum()


def _cached(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    del step
    with torch.no_grad():
        features = job.nets[number][0](inputs)
    return job.head(inputs).mean() * factor + features.sum()


def _after_forward(job: Job, step: Step, inputs: torch.Tensor, number: int, factor: float) -> Any:
    del step, factor
    job.models[number](inputs)
    return job.parameters(number) * 0


WRONG: dict[str, Part] = {
    "parameters": _parameters,
    "module": lambda j, _, x, n, f: j.nets[n](x).square().mean() * f,
    "cached": _cached,
    "head": _head,
    "half": lambda j, _, x, n, f: j.nets[n][1](x[:, :3]).mean() * f,
    "no_grad": _detached,
    "nothing": lambda *_: None,
    "twice": _twice,
    "two_backward": _two_backward,
    "other": _other,
    "once_more": _once_more,
    "before": _before,
    "frozen": _frozen,
}
RIGHT: dict[str, Part] = {
    "outputs": _outputs,
    "after_forward": _after_forward,
    "looks": _looks,
}
BY_HAND: dict[str, Part] = {"by_hand": _by_hand}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 0.00004},
    {"gradient_as_bucket_view": True},
)


@dataclass(frozen=True)
class Case:
    world: int
    rank: int
    step: int
    style: str
    factor: float
    model: int
    options: int
    every: int
    """The second model is trained in every so-manieth step."""

    @classmethod
    def drawn(cls, seed: int) -> Case:
        chance = random.Random(seed)
        world = chance.choice((2, 2, 3))
        every = chance.choice((1, 1, 3))
        step = chance.randrange(STEPS - 3)
        case = cls(
            world=world,
            rank=chance.randrange(world),
            step=step,
            style=chance.choice([*WRONG, *RIGHT]),
            factor=chance.choice((0.0, 1.0, 1e-3)),
            model=chance.randrange(2) if step % every == 0 else 0,
            options=chance.randrange(len(OPTIONS)),
            every=every,
        )
        unequal = OPTIONS[case.options].keys() & {"static_graph", "bucket_cap_mb"}
        if case.style == "frozen" and unequal:  # in size: gloo would abort a process
            case = replace(case, options=0)
        return case


@dataclass
class Outcome:
    """What one member did."""

    digests: list[str]
    """Of its weights after each step that it has committed."""
    refused: str = ""
    ended: bool = False
    doubtful: bool = False
    """The last step, which may be one of these, counts only if no other member holds the state
    before it."""

    @property
    def finished(self) -> bool:
        return not self.refused and not self.ended


def play(case: Case, *, undisturbed: bool = False) -> list[Outcome]:
    """Play the case; return what each member did."""
    outcomes: list[Outcome] = []
    over = multiprocessing.get_context("fork").Event()

    def member(seat: Seat) -> None:
        odd = not undisturbed and seat.rank == case.rank
        found = seat.exchange(vars(_take_part(seat, case, over, odd=odd)))
        if seat.rank == 0:
            raise _Found(found)

    try:
        run_together(*[member] * case.world)
    except AssertionError as error:
        outcomes = _outcomes(str(error))
    return outcomes


class _Found(Exception):
    """Carries the outcomes to the parent."""


def _outcomes(said: str) -> list[Outcome]:
    _, marker, told = said.rpartition("_Found: ")
    if not marker:
        raise AssertionError(said)
    return [Outcome(**each) for each in ast.literal_eval(told.strip())]


def _take_part(seat: Seat, case: Case, over: Event, *, odd: bool) -> Outcome:
    """over: the script of a member was refused, which ends the job."""
    training_module._ELSEWHERE_S = membership_module._ASK_AFTER_S = _QUICK_S
    job, outcome, done = Job(seat, OPTIONS[case.options]), Outcome([]), threading.Event()

    def answer() -> None:
        committed, since = 0, time.monotonic()
        while not done.wait(_QUICK_S):
            job.control.reports.answer()
            if len(outcome.digests) > committed:
                committed, since = len(outcome.digests), time.monotonic()
            elif time.monotonic() - since > _HANG_S:
                over.set()
            if over.is_set():
                job.control.membership.abandon()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        _train(job, case, outcome, odd=odd)
    except StepMisused as error:
        outcome.refused = str(error)
        over.set()
    except Ended:
        outcome.ended = True
    outcome.doubtful = job.session._training.part.doubtful
    done.set()
    thread.join()
    return outcome


def _train(job: Job, case: Case, outcome: Outcome, *, odd: bool) -> None:
    styles = {**WRONG, **RIGHT, **BY_HAND}
    generator = torch.Generator().manual_seed(2)
    data = torch.randn(STEPS * 6, _FEATURES, generator=generator, dtype=torch.float64)
    loader = DataLoader(
        torch.utils.data.TensorDataset(data), batch_size=6, global_batch=6, shuffle=False
    )
    for step in job.session.steps(loader, epochs=1):
        with step:
            for number in (0, 1):
                if number == 1 and step.index % case.every:
                    continue
                for (inputs,) in step.batches():
                    loss: torch.Tensor | None
                    if odd and step.index == case.step and number == case.model:
                        loss = styles[case.style](job, step, inputs, number, case.factor)
                    else:
                        loss = job.loss(number, inputs)
                    if loss is not None:
                        step.backward(loss)
                job.optimizers[number].step()
                job.optimizers[number].zero_grad()
        if step.committed:
            outcome.digests.append(job.digest())
