"""A session without an agent, in this very process: which samples its steps get, and misuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from elastic.core.data_order import DataPosition
from elastic.errors import StepMisused
from elastic.worker.control import LocalControl
from elastic.worker.data_loader import DataLoader
from elastic.worker.session import Session
from elastic.worker.step import Step

LENGTH = 10


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(LocalControl())
    model = session.distribute(torch.nn.Linear(1, 1, bias=False))
    session.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    yield session
    if dist.is_initialized():
        dist.destroy_process_group()


def loader() -> DataLoader:
    """Sample i is i."""
    dataset = TensorDataset(torch.arange(float(LENGTH)).unsqueeze(1))
    return DataLoader(dataset, batch_size=2, shuffle=False)


def train(step: Step) -> list[float]:
    """Do the step; return its samples."""
    with step:
        (inputs,) = next(step.batches())
        weight = torch.zeros(1, requires_grad=True, device=inputs.device)
        step.backward((inputs * weight).mean())
    samples: list[float] = inputs.flatten().tolist()
    return samples


def fail_in(step: Step) -> None:
    with step:
        next(step.batches())
        raise ZeroDivisionError


def test_the_steps_take_the_samples_in_order(session: Session) -> None:
    taken = [train(step) for step in session.steps(loader(), epochs=2)]
    assert taken == [[i, i + 1] for _ in range(2) for i in range(0, LENGTH, 2)]


def test_a_loop_begun_again_goes_on_where_the_last_one_was_left(session: Session) -> None:
    taken = []
    for step in session.steps(loader(), epochs=1):
        if step.index == 2:
            break
        taken.append(train(step))
    taken += [train(step) for step in session.steps(loader(), epochs=1)]
    assert taken == [[i, i + 1] for i in range(0, LENGTH, 2)]


def test_a_step_left_by_an_exception_is_not_passed_over(session: Session) -> None:
    steps = session.steps(loader(), epochs=1)
    with pytest.raises(ZeroDivisionError):
        fail_in(next(steps))
    with pytest.raises(StepMisused, match=r"step 0 was left by an exception"):
        next(steps)


def test_a_step_is_dealt_anew_if_the_group_changes_before_its_block(session: Session) -> None:
    """As a call of session.run at the loop's head can make it."""
    taken = []
    for step in session.steps(loader(), epochs=1):
        if step.index == 1:
            session._deal(session._group("steps"))
        taken.append(train(step))
    assert taken == [[i, i + 1] for i in range(0, LENGTH, 2)]


def test_a_step_that_the_others_have_done_is_passed_over(session: Session) -> None:
    """The group changed before its block, and the state received is that of the job's end."""
    steps = session.steps(loader(), epochs=1)
    step = next(steps)
    session._state.position = DataPosition(epoch=1, cursor=0)
    session._deal(session._group("steps"))
    with step:
        next(step.batches())
        raise AssertionError("there is no batch")
    assert step.committed
