"""A session without an agent, in the test's own process: its steps, its calls, and misuse."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils import data as torch_data
from torch.utils.data import TensorDataset

from elastic.errors import ConfigurationError, NotInGroup, StepMisused, Stranded
from elastic.runtime.training_lease import TrainingLease
from elastic.worker import session as session_module
from elastic.worker.control import LocalControl
from elastic.worker.data_loader import DataLoader
from elastic.worker.session import Session
from elastic.worker.step import Step
from elastic.worker.training import Training
from tests.unit.worker.trees import same

LENGTH = 10
IN_ORDER = [[float(i), i + 1.0] for i in range(0, LENGTH, 2)]


class Net(torch.nn.Linear):
    """A model with one weight."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)


@pytest.fixture
def bare() -> Iterator[Session]:
    """A session without a model."""
    yield Session(Training(LocalControl()))
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def session(bare: Session) -> Session:
    model = bare.distribute(Net())
    bare.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    return bare


def loader(**options: Any) -> DataLoader:
    """Return a loader whose sample i is i."""
    dataset = TensorDataset(torch.arange(float(LENGTH)).unsqueeze(1))
    return DataLoader(dataset, **{"batch_size": 2, "shuffle": False, **options})


def backward(step: Step) -> list[float]:
    """Do the backward passes of all micro-batches; return their samples."""
    samples: list[float] = []
    for (inputs,) in step.batches():
        step.backward(step._training.models[0](inputs).mean())
        samples += inputs.flatten().tolist()
    return samples


def train(step: Step) -> list[float]:
    """Do the step; return its samples."""
    with step:
        return backward(step)


def first_step(session: Session) -> Step:
    return next(session.steps(loader(), epochs=1))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_can_be_taken_again_in_a_block(session: Session, accumulate: int) -> None:
    """A GAN takes the batches first for the discriminator, then for the generator."""
    data = loader(batch_size=2 // accumulate, accumulate=accumulate)
    found = []
    for step in session.steps(data, epochs=1):
        with step:
            first, second = backward(step), backward(step)
        assert first == second
        found += second
    assert found == [sample for step in IN_ORDER for sample in step]


def test_another_call_of_batches_continues_where_the_last_one_was_left(session: Session) -> None:
    step = next(session.steps(loader(batch_size=1, accumulate=2), epochs=1))
    with step:
        seen = []
        for _ in range(2):
            (inputs,) = next(step.batches())
            step.backward(step._training.models[0](inputs).mean())
            seen += inputs.flatten().tolist()
    assert seen == IN_ORDER[0]


def test_a_second_backward_pass_through_one_forward_pass_is_refused(session: Session) -> None:
    model = session._training.models[0]
    for step in session.steps(loader(), epochs=1):
        with step:
            for (inputs,) in step.batches():
                step.backward(model(inputs).mean())
                step.backward(model(inputs).square().mean())  # after a forward pass of its own
                outputs = model(inputs)
                step.backward(outputs.mean(), retain_graph=True)
                with pytest.raises(
                    StepMisused, match=r"two backward passes.*add the losses and call"
                ):
                    step.backward(outputs.square().mean())


def test_parameters_thawed_between_two_backward_passes_of_a_block_are_averaged(
    bare: Session,
) -> None:
    """A CycleGAN freezes its discriminators while the generators train."""
    generator, discriminator = bare.distribute(Net()), bare.distribute(Net())
    bare.track(generator=generator, discriminator=discriminator)
    for step in bare.steps(loader(), epochs=1):
        with step:
            for (inputs,) in step.batches():
                discriminator.requires_grad_(False)
                fake = generator(inputs)
                step.backward(discriminator(fake).mean())
                discriminator.requires_grad_(True)
                step.backward(discriminator(fake.detach()).mean())
    assert bare.committed == len(IN_ORDER)


def test_calling_the_undistributed_module_is_refused_in_the_backward_pass(session: Session) -> None:
    """After the backward pass a `zero_grad()` may hide the gradients."""
    model = session._training.models[0]
    step = first_step(session)
    with step:
        for (inputs,) in step.batches():
            with pytest.raises(StepMisused, match=r"Net .*the module itself"):
                step.backward(model.module(inputs).mean())
            step.backward(model(inputs).mean())


def test_an_optimizer_does_not_step_if_the_block_has_averaged_nothing(session: Session) -> None:
    """Features that were computed before need no forward pass of the model."""
    model = session._training.models[0]
    (optimizer,) = session._training.state.optimizers()
    before = copy.deepcopy(model.module.state_dict())
    with first_step(session) as step:
        for (inputs,) in step.batches():
            step.backward((inputs * torch.zeros(1, requires_grad=True)).mean())
            with pytest.raises(StepMisused, match=r"averaged no gradients of Net: .*cached"):
                optimizer.step()
            assert same(model.module.state_dict(), before)
            step.backward(model(inputs).mean())
        optimizer.step()


def test_a_block_that_has_averaged_nothing_is_not_committed(session: Session) -> None:
    def train() -> None:
        with first_step(session) as step:
            for (inputs,) in step.batches():
                step.backward((inputs * torch.zeros(1, requires_grad=True)).mean())

    with pytest.raises(StepMisused, match=r"averaged no gradients of Net"):
        train()
    assert session.committed == 0


def test_a_block_without_trained_parameters_needs_no_average(session: Session) -> None:
    session._training.models[0].requires_grad_(False)
    with first_step(session) as step:
        for (inputs,) in step.batches():
            step.backward((inputs * torch.zeros(1, requires_grad=True)).mean())
    assert session.committed == 1


def test_parameters_without_a_gradient_are_named(bare: Session) -> None:
    net = torch.nn.ModuleDict({"used": torch.nn.Linear(1, 1), "other": torch.nn.Linear(1, 1)})
    net.forward = lambda inputs: net["used"](inputs)  # type: ignore[method-assign]
    model = bare.distribute(net, bucket_cap_mb=1e-6)
    bare.track(model=model)

    def train() -> None:
        with first_step(bare) as step:
            for (inputs,) in step.batches():
                step.backward(model(inputs).mean())

    with pytest.raises(StepMisused, match=r"other\.weight.*find_unused_parameters=True"):
        train()


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused(session: Session) -> None:
    model = session._training.models[0]
    (optimizer,) = session._training.state.optimizers()
    hook = model.module.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    step = first_step(session)
    with step:
        for (inputs,) in step.batches():
            with pytest.raises(StepMisused, match=r"SGD\.step\(\).*not averaged yet"):
                step.backward(model(inputs).mean())
            hook.remove()
            step.backward(model(inputs).mean())
            optimizer.step()


def test_backward_is_refused_while_the_generator_with_the_block_waits(session: Session) -> None:
    model = session._training.models[0]

    def batches() -> Iterator[tuple[Step, torch.Tensor]]:
        for step in session.steps(loader(), epochs=1):
            with step:
                for (inputs,) in step.batches():
                    yield step, inputs

    for step, inputs in batches():
        with pytest.raises(StepMisused, match="waits in its `yield`"):
            step.backward(model(inputs).mean())
        break


def test_context_managers_and_generators_may_have_the_block(session: Session) -> None:
    @contextlib.contextmanager
    def committed(step: Step) -> Iterator[Step]:
        with step:
            yield step

    @contextlib.contextmanager
    def by_another(step: Step) -> Iterator[Step]:
        yield from within(step)

    def within(step: Step) -> Iterator[Step]:
        with step:
            yield step

    def losses() -> Iterator[float]:
        for step in session.steps(loader(), epochs=1):
            with step:
                backward(step)
                yield 0.5

    data = loader()
    for step in session.steps(data, epochs=1):
        with by_another(step) if step.index % 2 else committed(step):
            backward(step)
    assert list(losses()) == [0.5] * len(IN_ORDER)


def test_tracking_a_new_object_inside_the_loop_is_refused(session: Session) -> None:
    """A worker that joins could not take over the object's state."""
    late = Net()
    for step in session.steps(loader(), epochs=1):
        train(step)
        with pytest.raises(StepMisused, match=r"session\.track\(late=.*above the loop"):
            session.track(late=late)
        with pytest.raises(StepMisused, match="above the loop"):
            session.track_local(late=late)
    session.track(late=late)
    for step in session.steps(loader(), epochs=1):
        session.track(late=late)  # tracked already
        train(step)


# ---- the steps


def test_the_steps_take_the_samples_in_order(session: Session) -> None:
    taken = [train(step) for step in session.steps(loader(), epochs=2)]
    assert taken == 2 * IN_ORDER
    assert session.committed == 2 * len(IN_ORDER)


def test_steps_know_their_index_and_epoch_and_whether_it_ends(session: Session) -> None:
    found = []
    for step in session.steps(loader(), epochs=2):
        train(step)
        found.append((step.index, step.epoch, step.ends_epoch, step.committed))
    assert found == [(i, i // 5, i % 5 == 4, True) for i in range(10)]


def test_every_nth_step_of_the_job_is_told_above_in_and_below_its_block(session: Session) -> None:
    data, found = loader(), []
    for epoch in range(2):
        for step in session.steps(data, epochs=epoch + 1):
            above = step.every(3)
            with step:
                inside = step.every(3)
                backward(step)
            assert above == inside == step.every(3)
            assert step.every(1)
            found.append(step.every(3))
    assert found == [False, False, True] * 3 + [False]


def test_drop_last_ends_an_epoch_before_its_remainder(session: Session) -> None:
    ends = []
    for step in session.steps(loader(batch_size=4, drop_last=True), epochs=2):
        train(step)
        ends.append(step.ends_epoch)
    assert ends == [False, True, False, True]


@pytest.mark.parametrize("place", ["above the block", "below it"])
def test_a_new_loop_continues_where_a_break_left_the_last_one(session: Session, place: str) -> None:
    data, taken = loader(), []
    for step in session.steps(data, epochs=1):
        if step.index == 2 and place == "above the block":
            break
        taken.append(train(step))
        if step.index == 1 and place == "below it":
            break
    assert taken == IN_ORDER[:2]
    taken += [train(step) for step in session.steps(data, epochs=1)]
    assert taken == IN_ORDER


def test_one_loop_per_epoch_trains_each_epoch_once(session: Session) -> None:
    data = loader()
    for epoch in range(3):
        assert [train(step) for step in session.steps(data, epochs=epoch + 1)] == IN_ORDER
    assert session.committed == 15


def test_loops_over_two_loaders_keep_a_position_for_each(session: Session) -> None:
    first, second = loader(), loader(batch_size=5)
    counts = []
    for data, epochs in ((first, 1), (second, 2), (first, 2)):
        taken = [train(step) for step in session.steps(data, epochs=epochs)]
        counts.append(len(taken))
        assert taken[0][0] == 0.0
    assert counts == [5, 4, 5]
    assert session.committed == 14


def test_epochs_that_are_trained_already_are_refused_in_a_later_loop(session: Session) -> None:
    """`epochs` counts those of the whole job: without the error a second loop would yield nothing,
    and the job would end after part of its training."""
    data = loader()
    list(map(train, session.steps(data, epochs=2)))
    for epochs in (1, 2):
        with pytest.raises(ConfigurationError, match=f"epochs={epochs}"):
            next(session.steps(data, epochs=epochs))
    assert len([train(step) for step in session.steps(data, epochs=3)]) == 5


def test_a_loader_of_torch_or_a_list_is_refused(session: Session) -> None:
    loaders = [torch_data.DataLoader(loader().dataset), [1, 2]]
    for data in loaders:
        with pytest.raises(ConfigurationError, match=r"session\.steps.*elastic\.DataLoader\("):
            next(session.steps(data, epochs=1))  # type: ignore[arg-type]


def test_a_loop_below_the_block_of_another_is_refused_as_that_goes_on(session: Session) -> None:
    steps = session.steps(loader(), epochs=1)
    train(next(steps))
    list(map(train, session.steps(loader(), epochs=1)))
    with pytest.raises(StepMisused, match="nested"):
        next(steps)


def test_a_loop_in_the_block_of_another_is_refused(session: Session) -> None:
    step = first_step(session)
    with pytest.raises(StepMisused, match="inside of the `with step:`"), step:
        next(session.steps(loader(), epochs=1))


def test_a_dataset_that_has_grown_between_two_loops_is_refused(session: Session) -> None:
    """Active learning does so. The added samples would never be trained on."""
    samples = [torch.zeros(1)] * 4
    data = DataLoader(samples, batch_size=4)  # type: ignore[arg-type]
    for step in session.steps(data, epochs=1):
        with step:
            for inputs in step.batches():
                step.backward(step._training.models[0](inputs).mean())
    samples.append(torch.zeros(1))
    with pytest.raises(ConfigurationError, match=r"had 4 samples .* has 5 now"):
        next(session.steps(data, epochs=2))


def test_a_loop_without_epochs_ends_after_its_steps(session: Session) -> None:
    taken = [train(step) for step in session.steps(loader(), max_steps=7)]
    assert taken == IN_ORDER + IN_ORDER[:2]


def test_each_loop_counts_its_own_steps_and_continues_in_the_data(session: Session) -> None:
    data = loader()
    taken = [[train(step) for step in session.steps(data, max_steps=n)] for n in (2, 4, 1)]
    assert taken == [IN_ORDER[:2], IN_ORDER[2:] + IN_ORDER[:1], IN_ORDER[1:2]]


@pytest.mark.parametrize(("epochs", "max_steps", "steps"), [(1, 7, 5), (2, 7, 7), (None, 7, 7)])
def test_a_loop_with_epochs_and_steps_ends_with_what_comes_first(
    session: Session, epochs: int | None, max_steps: int, steps: int
) -> None:
    loop = session.steps(loader(), epochs=epochs, max_steps=max_steps)
    assert len([train(step) for step in loop]) == steps


def test_a_loop_that_ended_with_its_steps_leaves_its_epochs_to_a_later_one(
    session: Session,
) -> None:
    data = loader()
    list(map(train, session.steps(data, epochs=1, max_steps=3)))
    assert [train(step) for step in session.steps(data, epochs=1)] == IN_ORDER[3:]


def test_the_loaders_len_is_the_steps_of_an_epoch_in_the_present_group(session: Session) -> None:
    data = loader()
    step = next(session.steps(data, epochs=1))
    assert len(data) == len(IN_ORDER)
    train(step)


def test_an_endless_loop_goes_on_until_the_script_leaves_it(session: Session) -> None:
    for step in session.steps(loader(), epochs=None):
        train(step)
        if session.committed == 12:
            break
    assert step.epoch == 2


def test_a_loop_loads_no_samples_beyond_its_steps(session: Session) -> None:
    indices: list[int] = []

    class Read(torch_data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return LENGTH

        def __getitem__(self, index: int) -> torch.Tensor:
            indices.append(index)
            return torch.zeros(1)

    for step in session.steps(DataLoader(Read(), shuffle=False), max_steps=3):
        with step:
            for inputs in step.batches():
                step.backward(step._training.models[0](inputs).mean())
    assert indices == [0, 1, 2]


def test_a_loop_that_was_begun_without_a_number_of_steps_cannot_get_one_later(
    session: Session,
) -> None:
    """A checkpoint of the middle of such a loop does not say where it began."""
    data, training = loader(), session._training
    list(map(train, session.steps(data, epochs=1)))
    steps = session.steps(data, epochs=2)
    train(next(steps))
    training.loops._max_steps = 3
    with pytest.raises(ConfigurationError, match=r"max_steps=3.*loop 2 .* without max_steps"):
        training.loops.steps_left(training.part)


def test_a_loop_without_any_end_is_refused(session: Session) -> None:
    with pytest.raises(ConfigurationError, match="max_steps="):
        next(session.steps(loader()))


def test_a_negative_number_of_epochs_is_refused(session: Session) -> None:
    with pytest.raises(ConfigurationError, match="epochs=-1"):
        next(session.steps(loader(), epochs=-1))


@pytest.mark.parametrize("steps", [0, -1, 2.5, "10", True], ids=repr)
def test_a_bad_number_of_steps_is_refused(session: Session, steps: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"max_steps={steps!r} "):
        next(session.steps(loader(), max_steps=steps))


def test_zero_epochs_give_no_steps(session: Session) -> None:
    assert list(session.steps(loader(), epochs=0)) == []


def fail_in(step: Step) -> None:
    with step:
        next(step.batches())
        raise ZeroDivisionError


def test_going_on_after_a_step_left_by_an_exception_is_refused(session: Session) -> None:
    steps = session.steps(loader(), epochs=1)
    with pytest.raises(ZeroDivisionError):
        fail_in(next(steps))
    with pytest.raises(StepMisused, match=r"step 0 was left by an exception"):
        next(steps)


class Unreadable(torch_data.Dataset[tuple[torch.Tensor]]):
    """A dataset whose third sample cannot be loaded."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        if index == 2:
            raise ValueError("bad sample")
        return (torch.tensor([float(index)]),)


@pytest.mark.parametrize("workers", [0, 1])
def test_taking_a_batch_again_that_could_not_be_loaded_is_refused(
    session: Session, workers: int
) -> None:
    """torch's loader would go on with the next one, whose samples are of another step."""
    data = DataLoader(Unreadable(), batch_size=2, shuffle=False, num_workers=workers)
    steps = session.steps(data, epochs=1)
    assert train(next(steps)) == [0.0, 1.0]
    step = next(steps)

    def skip_bad_samples() -> None:
        with step:
            with pytest.raises(ValueError, match="bad sample"):
                backward(step)
            backward(step)

    with pytest.raises(StepMisused, match="samples of another step"):
        skip_bad_samples()


def test_a_script_error_that_reads_like_a_lost_group_is_raised(session: Session) -> None:
    """Without an agent no group could follow a lost one."""
    with pytest.raises(RuntimeError, match="gloo"), first_step(session):
        raise RuntimeError("gloo: connection closed by peer")


@pytest.mark.parametrize("breaks_off", [False, True])
def test_model_eval_below_the_loop_does_not_change_the_saved_modes(
    session: Session, breaks_off: bool
) -> None:
    data, state, model = loader(), session._training.state, session._training.models[0]
    for epochs in (1, 2):
        model.train()
        for step in session.steps(data, epochs=epochs):
            assert state.extra()["modes"] == {"model": "11"}
            train(step)
            if breaks_off:
                break
        model.eval()
        assert state.extra()["modes"] == {"model": "11"}


def test_a_state_value_that_is_held_back_raises_another_error_than_a_missing_one(
    session: Session,
) -> None:
    list(map(train, session.steps(loader(), epochs=1)))
    with pytest.raises(KeyError, match=r"^'best'$"):
        session.state["best"]
    session._training.part.holds_back = True  # as in a worker that has just joined
    with pytest.raises(KeyError, match=r"'best' yet.*session\.state\.get\('best', \.\.\.\)"):
        session.state["best"]
    assert session.state.get("best", 1.0) == 1.0
    assert "best" not in session.state


def half(step: Step) -> None:
    (inputs,) = next(step.batches())
    step.backward(step._training.models[0](inputs).mean())


def half_of_a_second_pass(step: Step) -> None:
    backward(step)
    half(step)


MISUSES: dict[str, tuple[Callable[[Step], object], str]] = {
    "nothing": (lambda _: None, "without an averaged gradient"),
    "one of two micro-batches": (half, "without an averaged gradient"),
    "one of two in a second pass": (half_of_a_second_pass, "without an averaged gradient"),
    "backward before a batch": (
        lambda step: step.backward(torch.zeros(1, requires_grad=True).sum()),
        "before a batch",
    ),
    "mean before a batch": (lambda step: step.mean(loss=0.0), "before a batch"),
}


@pytest.mark.parametrize(("in_block", "named"), MISUSES.values(), ids=MISUSES)
def test_a_misused_step_is_refused(
    session: Session, in_block: Callable[[Step], object], named: str
) -> None:
    step = next(session.steps(loader(batch_size=1, accumulate=2), epochs=1))
    with pytest.raises(StepMisused, match=named), step:
        in_block(step)


def test_batches_outside_of_the_block_are_refused(session: Session) -> None:
    with pytest.raises(StepMisused, match="outside"):
        next(first_step(session).batches())


def test_taking_the_next_step_without_using_this_one_is_refused(session: Session) -> None:
    steps = session.steps(loader(), epochs=1)
    next(steps)
    with pytest.raises(StepMisused, match="with step"):
        next(steps)


def all_reduce_above(session: Session) -> None:
    for step in session.steps(loader(), epochs=1):
        dist.all_reduce(torch.ones(1))
        train(step)


def all_reduce_below(session: Session) -> None:
    for step in session.steps(loader(), epochs=1):
        train(step)
        dist.all_reduce(torch.ones(1))


def all_reduce_below_a_call(session: Session) -> None:
    for step in session.steps(loader(), epochs=1):
        train(step)
        session.run(dict)
        dist.all_reduce(torch.ones(1))


def all_reduce_between_loops(session: Session) -> None:
    data = loader()
    for epoch in range(2):
        for step in session.steps(data, epochs=epoch + 1):
            train(step)
        dist.all_reduce(torch.ones(1))


def all_reduce_after_the_loop(session: Session) -> None:
    for step in session.steps(loader(), epochs=1):
        train(step)
    dist.all_reduce(torch.ones(1))
    session._training.finish()


@pytest.mark.parametrize(
    "script",
    [
        all_reduce_above,
        all_reduce_below,
        all_reduce_below_a_call,
        all_reduce_between_loops,
        all_reduce_after_the_loop,
    ],
)
def test_a_collective_outside_of_a_block_is_refused(
    session: Session, script: Callable[[Session], None]
) -> None:
    """It is refused in an undisturbed run, too: it would go wrong at the first loss of a group."""
    with pytest.raises(StepMisused, match=r"outside of `with step:` .*session\.run\(\)"):
        script(session)


def test_collectives_inside_blocks_and_calls_are_allowed(session: Session) -> None:
    for step in session.steps(loader(), epochs=1):
        with step:
            dist.all_reduce(torch.ones(1))
            backward(step)
            dist.all_reduce(torch.ones(1))
        session.run(dist.all_reduce, torch.ones(1))
    session.run(dist.barrier)
    session._training.finish()


# ---- distributed models


def test_a_script_without_a_distributed_model_is_refused(bare: Session) -> None:
    bare.track(model=Net())
    with pytest.raises(ConfigurationError, match="distribute"):
        first_step(bare)


def test_a_distributed_model_that_is_not_tracked_is_refused(bare: Session) -> None:
    bare.distribute(Net())
    with pytest.raises(ConfigurationError, match=r"Net.*track"):
        first_step(bare)


def test_a_distributed_model_inside_of_a_tracked_one_is_tracked(bare: Session) -> None:
    bare.track(both=torch.nn.Sequential(bare.distribute(Net())))
    assert train(first_step(bare)) == [0.0, 1.0]


def test_a_call_of_the_bare_module_is_refused(bare: Session) -> None:
    net = Net()
    bare.track(model=bare.distribute(net))
    step = first_step(bare)
    with pytest.raises(StepMisused, match="Net"), step:
        step.backward(net(*next(step.batches())).mean())
    assert bare.committed == 0


class WithBuffer(Net):
    """Has buffers, one of which is not part of its state."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(length))
        self.register_buffer("cache", torch.zeros(length), persistent=False)


@pytest.mark.parametrize("tracked", ["before", "after"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_layer_that_is_assigned_above_the_first_loop_is_followed_as_if_built_so(
    bare: Session, tracked: str, inside: bool
) -> None:
    """Its gradients outlive a step, and its buffers are those that all members build alike."""
    model = bare.distribute(torch.nn.Sequential(torch.nn.Sequential(WithBuffer(1)), Net()))
    if tracked == "before":
        bare.track(model=model)
    layer = WithBuffer(3)
    if inside:
        model.get_submodule("module.0")[0] = layer  # type: ignore[operator]
    else:
        setattr(model, "0", torch.nn.Sequential(layer))
    del model.module[1]
    if tracked == "after":
        bare.track(model=model)
    with first_step(bare) as step:
        backward(step)
    state = bare._training.state
    assert layer.weight.grad is not None
    state.gradients.begin()
    gradients = state.gradients.state_dict()["gradients"]
    assert [name for named in gradients.values() for name in named] == ["0.0.weight"]
    assert not state.buffers.reshaped()
    assert not state.buffers.removed()
    assert not state.buffers.caches
    shapes = {spec.name: spec.shape for spec in state.structure()}
    assert shapes == {"model.0.0.weight": (1, 1), "model.0.0.seen": (3,)}


def test_sync_batch_norm_is_refused_on_cpus(bare: Session) -> None:
    if bare.device.type != "cpu":
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigurationError, match="SyncBatchNorm"):
        bare.distribute(torch.nn.Sequential(torch.nn.SyncBatchNorm(2)))


# ---- the group


@pytest.mark.parametrize("name", ["rank", "world_size", "generation"])
def test_rank_world_size_and_generation_are_known_in_the_loop(session: Session, name: str) -> None:
    with pytest.raises(NotInGroup, match=f"session.{name}"):
        getattr(session, name)
    step = first_step(session)
    assert {"rank": 0, "world_size": 1, "generation": 1}[name] == getattr(session, name)
    train(step)


# ---- calls outside of steps


def test_session_run_passes_arguments_and_returns_the_result(session: Session) -> None:
    with pytest.raises(ConfigurationError, match=r"before .*session\.steps.*step\.index == 0"):
        session.run(dict)
    found = []
    for step in session.steps(loader(), epochs=1):
        train(step)
        found.append(session.run(dict, [("index", step.index)], committed=session.committed))
    assert found == [{"index": i, "committed": i + 1} for i in range(5)]
    assert session.run(max, 3, 4) == 4


def test_a_call_inside_of_a_block_is_refused(session: Session) -> None:
    with pytest.raises(StepMisused, match="inside"), first_step(session):
        session.run(dict)


def test_an_error_in_a_call_is_raised_to_the_script(session: Session) -> None:
    train(first_step(session))
    with pytest.raises(ZeroDivisionError):
        session.run(lambda: 1 // 0)


def test_a_call_between_loops_returns_a_result_that_can_be_sent_to_others(session: Session) -> None:
    """A worker that joins later skips the earlier loops and gets the results of such calls."""
    data = loader()
    list(map(train, session.steps(data, epochs=1)))
    result = {"loss": torch.tensor(0.5), "names": ["a"]}
    assert session.run(lambda: result) is result
    steps = session.steps(data, epochs=2)
    train(next(steps))
    assert session.run(lambda: object()) is not None  # no worker skips a call in the loop
    steps.close()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (object(), r"run\(.*between two loops.*object"),
        (torch.zeros(500_000), "2000000"),
        ({"predictions": np.zeros(250_000)}, "2000000"),
    ],
    ids=["object", "tensor", "array"],
)
def test_a_loop_after_a_call_whose_result_cannot_be_sent_is_refused(
    session: Session, result: object, message: str
) -> None:
    data = loader()
    list(map(train, session.steps(data, epochs=1)))
    assert session.run(lambda: result) is result  # allowed: it may be the script's last call
    with pytest.raises(ConfigurationError, match=message):
        next(session.steps(data, epochs=2))


def test_calls_after_a_loop_with_a_live_iterator_are_identified_by_their_line(
    session: Session,
) -> None:
    """They cannot be distinguished from calls in the loop, which a worker that joins skips."""
    data = loader()
    steps = session.steps(data, epochs=1)
    train(next(steps))
    session.run(lambda: "of a step before")
    train(next(steps))
    session.run(lambda: 0.25)
    session.run(lambda: 0.5)
    more = session.steps(loader(), epochs=1)
    train(next(more))
    results = session._training.state.results
    assert list(results.values()) == [0.25, 0.5]
    assert all(key.startswith("0/test_session_alone.py:") for key in results)
    steps.close()  # has no effect any more
    session.run(lambda: object())  # in the second loop
    list(map(train, more))
    assert list(results.values()) == [0.25, 0.5]


def test_repeated_calls_at_one_line_after_a_loop_with_a_live_iterator_are_refused(
    session: Session,
) -> None:
    data = loader()
    steps = session.steps(data, epochs=1)
    train(next(steps))
    for number in range(2):
        session.run(lambda number=number: number)
    with pytest.raises(StepMisused, match=r"2 times .*close\(\)"):
        next(session.steps(data, epochs=2))


class Score(dict[str, float]):
    """A result of the script's own class, which cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Score:
        raise RuntimeError


def test_a_forward_pass_between_two_loops_is_refused_as_the_next_one_begins(
    session: Session,
) -> None:
    """A worker that joins would pass the place with an untrained model."""
    data, model = loader(), session._training.models[0]
    model(torch.ones(1, 1))  # above the first loop, all workers have the same
    for step in session.steps(data, epochs=1):
        train(step)
        model(torch.ones(1, 1))  # a worker that joins does not come here before it has the state
    model(torch.ones(1, 1))
    with pytest.raises(StepMisused, match=r"test_session_alone\.py:\d+ calls .*session\.run\("):
        next(session.steps(data, epochs=2))
    assert session.committed == 5


def test_forward_passes_between_loops_that_a_newcomer_does_not_make_are_allowed(
    session: Session,
) -> None:
    data, model = loader(), session._training.models[0]
    for epoch in range(3):
        for step in session.steps(data, epochs=epoch + 1):
            train(step)
        session.run(lambda: model(torch.ones(1, 1)).item())
        if not session.catching_up:
            model(torch.ones(1, 1))
        copy.deepcopy(model)(torch.ones(1, 1))
    assert session.committed == 15


def test_an_answer_of_catching_up_counts_until_the_next_loop_has_ended(session: Session) -> None:
    data, model = loader(), session._training.models[0]
    for epoch in range(2):
        for step in session.steps(data, epochs=epoch + 1):
            assert not session.catching_up
            train(step)
        if epoch or not session.catching_up:
            model(torch.ones(1, 1))
    with pytest.raises(StepMisused, match="between two loops"):
        next(session.steps(data, epochs=3))


def test_a_forward_pass_after_the_last_loop_is_allowed(session: Session) -> None:
    list(map(train, session.steps(loader(), epochs=1)))
    session._training.models[0](torch.ones(1, 1))
    session._training.finish()


def test_results_after_the_last_loop_may_have_any_type_and_are_not_kept(session: Session) -> None:
    list(map(train, session.steps(loader(), epochs=1)))

    def call(result: Any) -> Any:
        return session.run(lambda: result)

    score = Score(loss=0.5)
    assert call(score) is score
    gone = weakref.ref(call(torch.zeros(500_000)))
    call(0)
    gc.collect()
    assert gone() is None


# ---- tracked by the session


def test_session_state_can_be_saved_by_the_script(session: Session, tmp_path: Path) -> None:
    session.state["best"] = 0.5
    torch.save(session.state, tmp_path / "state.pt")
    assert dict(torch.load(tmp_path / "state.pt", weights_only=False)) == {"best": 0.5}
    assert copy.deepcopy(session.state) == {"best": 0.5}


def test_session_state_is_a_dictionary(session: Session) -> None:
    session.state["best"] = 0.5
    session.state.update(phase=2)
    assert dict(session.state) == {"best": 0.5, "phase": 2}
    assert session.state is session.state
    assert session.state.state_dict() == {"best": 0.5, "phase": 2}


KINDS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda g: torch.rand(3, generator=g),
    "numpy": lambda g: g.normal(size=3),
    "python": lambda g: (g.random(), g.gauss(0.0, 1.0)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_is_tracked_by_name(session: Session, kind: Any) -> None:
    draw = KINDS[kind]
    generator = session.generator("noise", kind=kind, seed=3)
    types = {"torch": torch.Generator, "numpy": np.random.Generator, "python": random.Random}
    assert isinstance(generator, types[kind])
    assert session.generator("noise", kind=kind, seed=9) is generator
    tracked = session._training.state.everything["session.generator.noise"]
    draw(generator)
    state = tracked.state_dict()
    first = draw(generator)
    tracked.load_state_dict(state)
    assert same(draw(generator), first)
    other = session.generator("other", kind=kind, seed=3)
    assert not same(draw(other), first)


def test_equal_seeds_give_equal_numbers(session: Session) -> None:
    for kind, draw in KINDS.items():
        pair = [session.generator(f"{kind}{i}", kind=kind, seed=3) for i in range(2)]  # type: ignore[call-overload]
        assert same(*map(draw, pair))


def test_an_unknown_kind_of_generator_is_refused(session: Session) -> None:
    with pytest.raises(ConfigurationError, match="kind='jax'"):
        session.generator("noise", kind="jax")  # type: ignore[call-overload]
    session.generator("noise")


def test_asking_for_a_generator_again_as_another_kind_is_refused(session: Session) -> None:
    session.generator("noise", kind="torch")
    with pytest.raises(ConfigurationError, match="noise"):
        session.generator("noise", kind="numpy")


# ---- warming up


def test_warm_up_changes_no_parameters_and_is_refused_in_the_loop(session: Session) -> None:
    model, optimizer = session._training.state.tracked.values()
    before = [p.clone() for p in model.parameters()]  # type: ignore[attr-defined]

    def first_pass(value: float, *, times: int) -> None:
        for _ in range(times):
            model(torch.full((2, 1), value)).mean().backward()  # type: ignore[operator]
            optimizer.step()  # type: ignore[attr-defined]

    session.warm_up(first_pass, 2.0, times=2)
    after = list(model.parameters())  # type: ignore[attr-defined]
    assert same([p.detach() for p in after], [p.detach() for p in before])
    assert all(p.grad is None for p in after)
    step = first_step(session)
    with pytest.raises(StepMisused, match="warm_up"):
        session.warm_up(first_pass, 2.0, times=1)
    train(step)


def test_an_error_in_warm_up_is_raised_to_the_script(session: Session) -> None:
    with pytest.raises(ZeroDivisionError):
        session.warm_up(lambda: 1 // 0)


@pytest.mark.parametrize("distributes", [False, True])
def test_an_optimizer_that_steps_above_the_first_loop_is_refused(
    bare: Session, distributes: bool
) -> None:
    """As under the trainer of a framework, where each worker would train alone."""
    net = Net()
    model = bare.distribute(net) if distributes else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fit() -> None:
        model(torch.ones(2, 1)).mean().backward()
        optimizer.step()

    def fails() -> None:
        fit()
        raise ZeroDivisionError

    before = net.weight.item()
    for _ in range(2):
        with pytest.raises(StepMisused, match=r"SGD\.step.*session\.steps.*session\.warm_up"):
            fit()
        assert net.weight.item() == before
        bare.warm_up(fit)
        with pytest.raises(ZeroDivisionError):
            bare.warm_up(fails)
        before = net.weight.item()  # warm_up puts back what is tracked, and nothing else
    bare.track(model=bare.distribute(net), optimizer=optimizer)
    for step in bare.steps(loader(), epochs=1):
        with step:
            backward(step)
            optimizer.step()
            optimizer.zero_grad()
    fit()  # below the loop, with gradients of its own


# ---- advice


def test_parameters_of_a_distributed_model_that_is_not_called_are_refused(bare: Session) -> None:
    """Weights of losses in a ParameterList: their gradients would not be averaged."""
    model = bare.distribute(Net())
    weights = bare.distribute(torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1))]))
    bare.track(model=model, weights=weights)
    step = first_step(bare)
    with step:
        inputs = next(step.batches())[0]
        loss = (model(inputs) * next(weights.parameters())).mean()
        with pytest.raises(StepMisused, match=r"ParameterList .*without being averaged"):
            step.backward(loss)
        step.backward((model(inputs) * 0).mean())


def test_a_bare_parameter_in_an_optimizer_leads_to_a_distributed_module(session: Session) -> None:
    bare_weight = torch.nn.Parameter(torch.ones(1))
    model = session._training.models[0]
    optimizer = torch.optim.SGD([*model.parameters(), bare_weight], lr=0.1)
    session.track(both=optimizer)
    step = first_step(session)
    with step:
        inputs = next(step.batches())[0]
        step.backward((model(inputs) * bare_weight).mean())
        with pytest.raises(StepMisused, match=r"nn\.Parameter.*forward\(\)"):
            optimizer.step()


@pytest.mark.parametrize(
    "options", [{"batch_size": None}, {"batch_size": 2.0}, {"accumulate": "2"}]
)
def test_a_batch_size_that_is_no_number_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        loader(**options)


def test_what_cannot_be_kept_in_the_state_should_be_tracked(session: Session) -> None:
    session.state["schedule"] = object()
    with pytest.raises(ConfigurationError, match=r"session\.state\.schedule.*session\.track\(\)"):
        session._training.state.capture()


# ---- the public attributes


def public(item: object) -> set[str]:
    return {name for name in dir(item) if not name.startswith("_")}


def test_a_session_has_exactly_the_documented_public_attributes() -> None:
    """An attribute is a promise: add one on purpose, and to docs/GUIDE.md."""
    assert public(Session) == {
        "catching_up",
        "close",
        "committed",
        "device",
        "distribute",
        "evaluate",
        "gather",
        "generation",
        "generator",
        "load",
        "local_rank",
        "local_world_size",
        "lr_factor",
        "mean",
        "on_group_change",
        "on_rank0",
        "rank",
        "run",
        "scale_lr",
        "state",
        "steps",
        "track",
        "track_local",
        "warm_up",
        "world_size",
    }
    instance = Session(Training(LocalControl()))
    assert not {name for name in vars(instance) if not name.startswith("_")}


def test_a_step_has_exactly_the_documented_public_attributes(session: Session) -> None:
    step = first_step(session)
    ours = {"was_entered", "reduce_means"}  # for the training loop
    assert public(step) - ours == {
        "backward",
        "batches",
        "committed",
        "counts",
        "ends_epoch",
        "epoch",
        "every",
        "index",
        "indices",
        "mean",
        "means",
        "positions",
        "report",
        "samples",
        "share",
        "skip",
        "skipped",
    }
    train(step)


@pytest.mark.parametrize("n", [0, -3, 2.5, "10", True, None], ids=repr)
def test_every_so_many_steps_needs_a_number(session: Session, n: Any) -> None:
    step = first_step(session)
    with pytest.raises(StepMisused, match=r"step\.every\("):
        step.every(n)
    train(step)


# ---- elastic.init()


@pytest.mark.parametrize("world_size", ["2", " 8 "])
def test_init_under_another_launcher_with_several_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, world_size: str
) -> None:
    """Each process would train a model of its own."""
    monkeypatch.setattr(session_module, "_current", None)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ConfigurationError, match="WORLD_SIZE"):
        session_module.init()
    assert session_module._current is None


@pytest.mark.parametrize("world_size", [None, "1", ""])
def test_init_without_an_agent_starts_a_job_of_one(
    monkeypatch: pytest.MonkeyPatch, world_size: str | None
) -> None:
    monkeypatch.setattr(session_module, "_current", None)
    if world_size is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    session = session_module.init()
    assert session_module.init() is session
    assert session_module.current_training() is session._training


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No session has been made yet. The last one is closed after the test."""
    monkeypatch.setattr(session_module, "_current", None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield
    if session_module._current is not None:
        session_module._current.close()


def trained(steps: int) -> Session:
    """What a cell of a notebook does."""
    session = session_module.init()
    model = session.distribute(Net())
    session.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    list(map(train, session.steps(loader(), max_steps=steps)))
    return session


@pytest.mark.usefixtures("fresh")
def test_a_fresh_session_follows_a_closed_one() -> None:
    first = trained(3)
    first.close()
    assert not dist.is_initialized()
    second = trained(2)
    assert second is not first
    assert (first.committed, second.committed) == (3, 2)
    first.close()  # again: the other one goes on
    assert session_module.init() is second
    assert second.world_size == 1


@pytest.mark.usefixtures("fresh")
def test_a_session_can_be_closed_in_the_middle_of_a_step() -> None:
    """As after a cell that was interrupted."""
    session = trained(1)
    step = next(session.steps(loader(), epochs=None))

    def interrupt() -> None:
        next(step.batches())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), step:
        interrupt()
    session.close()
    assert trained(2).committed == 2


@pytest.mark.usefixtures("fresh")
def test_the_optimizers_of_a_closed_session_and_its_model_are_free() -> None:
    session = session_module.init()
    model = session.distribute(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.track(model=model, optimizer=optimizer)
    list(map(train, session.steps(loader(), max_steps=1)))
    session.close()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigurationError, match=r"after session\.close"):
        next(session.steps(loader(), epochs=1))


@pytest.mark.usefixtures("fresh")
def test_closing_the_session_of_a_worker_with_an_agent_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = session_module.init()
    with monkeypatch.context() as patch:
        patch.setattr(session_module, "_link", object())
        with pytest.raises(ConfigurationError, match="without an agent"):
            session.close()


def test_init_is_refused_in_a_script_for_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_refusal", "")
    session_module.refuse("a script for torchrun")
    with pytest.raises(ConfigurationError, match="torchrun"):
        session_module.init()


# ---- the end


def test_a_script_that_ends_without_training_is_refused(session: Session) -> None:
    with pytest.raises(ConfigurationError, match="without training"):
        session._training.finish()


def test_finish_succeeds_after_training(session: Session) -> None:
    list(map(train, session.steps(loader(), epochs=1)))
    session._training.finish()


# ---- memory


def test_loaders_of_past_epochs_are_freed_and_each_has_its_own_number(session: Session) -> None:
    """A loader's dataset may be large. A new loader at a freed one's address is another loader."""
    alive: list[weakref.ref[DataLoader]] = []
    for epoch in range(6):
        data = loader()
        for step in session.steps(data, epochs=epoch + 1):
            with step:
                backward(step)
        alive.append(weakref.ref(data))
        assert session._training.part.loader == epoch
    del data
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 1  # the newest loader's steps may go on
    assert len(session._training.loops._loaders) <= 1
    assert len(session._finished_loops) <= 1


def test_deleted_optimizers_are_forgotten(session: Session) -> None:
    optimizers = session._training.optimizers
    for _ in range(100):
        optimizer = torch.optim.SGD([torch.zeros(0, requires_grad=True)], lr=0.1)
        optimizers._known[optimizer] = 1
    del optimizer
    gc.collect()
    assert len(optimizers._known) == 0


@pytest.mark.parametrize("epochs", [2.5, "3", True, 2.0], ids=repr)
def test_epochs_that_are_no_whole_number_are_refused(session: Session, epochs: Any) -> None:
    with pytest.raises(ConfigurationError, match="no whole number"):
        next(session.steps(loader(), epochs=epochs))


def test_epochs_may_be_a_number_of_numpy(session: Session) -> None:
    assert next(session.steps(loader(), epochs=np.int64(1))).index == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["track", "track_local"])
def test_objects_without_names_are_refused(session: Session, method: str) -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigurationError, match=r"without names \(Linear, SGD\).*model=model"):
        getattr(session, method)(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("method", ["mean", "report"])
def test_values_without_names_are_refused(session: Session, method: str) -> None:
    step = next(session.steps(loader(), epochs=1))
    with step:
        for (inputs,) in step.batches():
            with pytest.raises(StepMisused, match=rf"'abc' without a name.*{method}\(loss=loss\)"):
                getattr(step, method)("abc")
            step.backward(step._training.models[0](inputs).mean())


def test_means_and_figures_may_have_any_name(session: Session) -> None:
    losses = {"self": torch.ones(()), "a b": 2.0, "name": 3, "": 4}
    for step in session.steps(loader(), epochs=1):
        with step:
            for (inputs,) in step.batches():
                means = step.mean(**losses)
                step.backward(step._training.models[0](inputs).mean())
            step.report(**losses)
        step.report(**losses)
        assert dict(means) == losses


# ---- the node's lease to train


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lapsing:
    """A lease that is renewed the first time that the script waits for it."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.page = TrainingLease.new()
        self.page.grant(now() + 600.0)
        self._training = session._training
        self._training.control.lease = self.page.share()
        self.waited: list[tuple[bool, int]] = []
        """In a block, and committed steps, each time that the script waited."""
        monkeypatch.setattr(time, "sleep", self._sleep)

    def lapse(self) -> None:
        self.page.grant(now())

    def _sleep(self, _: float) -> None:
        self.waited.append((self._training.in_block, self._training.state.committed))
        self.page.grant(now() + 600.0)


def test_a_step_begins_only_while_the_lease_holds(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lapsing(session, monkeypatch)
    for step in session.steps(loader(), epochs=1):
        if step.index == 2:
            lease.lapse()
        train(step)
        assert step.committed
    assert lease.waited == [(False, 2)]


def test_a_step_is_committed_only_while_the_lease_holds(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lapsing(session, monkeypatch)
    for step in session.steps(loader(), epochs=1):
        with step:
            backward(step)
            if step.index == 2:
                lease.lapse()
        assert step.committed
    assert lease.waited == [(True, 2)]
    assert session.committed == len(IN_ORDER)
    assert lease.page.newest_commit == (1, len(IN_ORDER))


@pytest.mark.parametrize("begun", [False, True])
def test_a_worker_whose_lease_is_over_for_good_is_stranded_and_commits_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    lease = Lapsing(session, monkeypatch)
    steps = session.steps(loader(), epochs=1)
    step = next(steps)
    if not begun:
        lease.page.begin_epoch()

    def block() -> None:
        with step:
            assert begun
            backward(step)
            lease.page.begin_epoch()
            lease.page.grant(now() + 600.0)

    with pytest.raises(Stranded, match="--isolation-timeout-s"):
        block()
    assert session.committed == 0
    assert lease.waited == []
