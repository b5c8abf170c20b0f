"""Sessions of several processes lose their group: nothing of a lost block remains."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from elastic.errors import StepMisused
from elastic.worker import control
from elastic.worker.data_loader import DataLoader
from elastic.worker.group import membership
from elastic.worker.state.checkpointing import Checkpointing
from elastic.worker.step import Step
from tests.unit.worker.together import Seat, die, in_processes, run_together
from tests.unit.worker.training_together import Peer, in_sessions, numbers, train_together


def backward(peer: Peer, step: Step) -> None:
    for (inputs,) in step.batches():
        step.backward((peer.model(inputs) - 1.0).square().mean())


Script = Callable[[Peer, Step, Callable[[], None]], None]


def plain(peer: Peer, step: Step, lose: Callable[[], None]) -> None:
    """The group is lost in the backward pass."""
    with step:
        lose()
        backward(peer, step)
        peer.update()


def after_the_backward(peer: Peer, step: Step, lose: Callable[[], None]) -> None:
    with step:
        backward(peer, step)
        lose()
        total = torch.ones(1)
        dist.all_reduce(total)
        peer.update()


def a_collective_after_the_optimizer(peer: Peer, step: Step, lose: Callable[[], None]) -> None:
    """The script averages a loss for a log. The line below the collective must run once."""
    with step:
        backward(peer, step)
        peer.update()
        lose()
        dist.all_reduce(torch.ones(1))
        peer.session.state["updates"] = peer.session.state.get("updates", 0) + 1


def between_two_optimizers(peer: Peer, step: Step, lose: Callable[[], None]) -> None:
    with step:
        backward(peer, step)
        peer.update()
        lose()
        backward_again = (peer.model(torch.ones(1, 1, dtype=torch.float64)) + 2.0).square().mean()
        backward_again.backward()
        peer.update()


def state_at_the_top(peer: Peer, step: Step, lose: Callable[[], None]) -> None:
    with step:
        peer.session.state["top"] = peer.session.state.get("top", 0) + 1
        noise = torch.rand(1, generator=peer.session.generator("noise", seed=1)).item()
        peer.session.state["drawn"] = peer.session.state.get("drawn", 0.0) + noise
        lose()
        backward(peer, step)
        peer.update()


SCRIPTS: list[Script] = [
    plain,
    after_the_backward,
    a_collective_after_the_optimizer,
    between_two_optimizers,
    state_at_the_top,
]


def trained(
    peer: Peer, script: Script, members: tuple[int, ...], lost_at: dict[int, int]
) -> list[Any]:
    """Train on eight samples; in step `index` the group `lost_at[index]` replaces this one."""
    peer.announce(1, *members)
    peer.optimizer.param_groups[0]["lr"] = 0.001
    lost_at = dict(lost_at)
    for step in peer.session.steps(numbers(8, batch_size=1), epochs=2):
        number = lost_at.pop(step.index, None)

        def lose(number: int | None = number) -> None:
            if number is not None:
                peer.announce(number, *members)

        script(peer, step, lose)
    assert not lost_at
    return [peer.weight, dict(peer.session.state), peer.session.committed]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("lost_at", [{0: 2}, {1: 2, 3: 3}, {6: 2}], ids=str)
@in_processes(4)
def test_a_job_that_loses_its_group_ends_with_the_state_of_an_undisturbed_one(
    seat: Seat, script: Script, lost_at: dict[int, int]
) -> None:
    """Two members lose their group and two do not: they end bit for bit the same."""
    disturbed = seat.rank >= 2
    members = (2, 3) if disturbed else (0, 1)
    mine = trained(Peer(seat), script, members, lost_at if disturbed else {})
    found = seat.exchange(mine)
    assert all(other == found[0] for other in found), found
    assert mine[2] == 8


# ---- calls below a block that does not count


@in_sessions(2)
def test_a_call_below_a_void_block_returns_its_last_result_without_running(peer: Peer) -> None:
    calls: list[int] = []
    found: list[tuple[bool, int]] = []
    lost = False
    for step in peer.session.steps(numbers(8, batch_size=1), epochs=1):
        with step:
            if step.index == 2 and not lost:
                lost = True
                peer.announce(2)
            backward(peer, step)

        def evaluate(index: int = step.index) -> dict[str, int]:
            dist.all_reduce(torch.ones(1))
            calls.append(index)
            return {"index": index}

        # A script that changes a result does not change what the next call returns.
        found.append((step.committed, peer.session.run(evaluate).pop("index")))
    assert calls == [0, 1, 2, 3]
    assert found == [(True, 0), (True, 1), (False, 1), (True, 2), (True, 3)]
    peer.seat.exchange("done")


@in_sessions(2)
def test_calls_of_a_helper_below_a_void_block_return_each_its_own_last_result(peer: Peer) -> None:
    found = []
    lost = False

    def mean(value: float) -> float:
        average: float = peer.session.mean(value)
        return average

    for step in peer.session.steps(numbers(8, batch_size=1), epochs=1):
        above = mean(step.index + 0.25) if step.index != 1 else 0.25
        with step:
            if step.index == 2 and not lost:
                lost = True
                peer.announce(2)
            backward(peer, step)
        found.append((step.committed, above, [mean(step.index + part) for part in (0.5, 0.75)]))
    assert found == [
        (True, 0.25, [0.5, 0.75]),
        (True, 0.25, [1.5, 1.75]),
        (False, 2.25, [1.5, 1.75]),
        (True, 2.25, [2.5, 2.75]),
        (True, 3.25, [3.5, 3.75]),
    ]
    peer.seat.exchange("done")


@in_sessions(3)
def test_the_best_models_file_is_written_though_rank_0_is_lost_as_it_writes(
    peer: Peer, tmp_path: Path
) -> None:
    """As the guide's chapter on evaluation says."""
    session, best = peer.session, tmp_path / "best"
    losses = [3.0, 2.0, 1.0, 4.0, 4.0]

    def save_best(index: int) -> None:
        if index == 2 and session.generation == 1:
            peer.seat.exchange("in the call")
            if session.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if session.rank == 0:
            best.with_suffix(".tmp").write_text(f"{index}")
            best.with_suffix(".tmp").replace(best)
        dist.barrier()

    follow(peer, 2, 1, 2)
    for step in session.steps(numbers(12, batch_size=1), epochs=1):
        with step:
            backward(peer, step)
            peer.update()
        if step.committed and losses[step.index] < session.state.get("best", math.inf):
            session.run(save_best, step.index)
            session.state["best"] = losses[step.index]
    assert (session.generation, session.committed) == (2, 5)
    assert (session.state["best"], best.read_text()) == (1.0, "2")


# ---- groups that are lost without an announcement


def follow(peer: Peer, number: int, *ranks: int) -> None:
    """Announce the next group only when this member has found by itself that its group is lost."""
    report_loss: Callable[..., None] = peer.control.membership.report_loss

    def report(error: BaseException, *, held: bool = False) -> None:
        report_loss(error, held=held)
        peer.announce(number, *ranks)

    peer.control.membership.report_loss = report  # type: ignore[method-assign]


def cut(peer: Peer) -> None:
    """Break the connections of the group."""
    group = peer.control.membership.group
    assert group is not None
    group._sockets.cut()


def nothing() -> None:
    """The loss shows in the backward pass."""


def gather() -> None:
    dist.all_gather([torch.zeros(1) for _ in range(3)], torch.zeros(1))


def wait_for_work() -> None:
    work = dist.all_reduce(torch.zeros(1), async_op=True)
    assert work is not None
    work.wait()


@pytest.mark.parametrize(
    ("call", "compiled"),
    [
        (nothing, False),
        (gather, False),
        pytest.param(nothing, True, marks=pytest.mark.long),
        pytest.param(wait_for_work, False, marks=pytest.mark.long),
        pytest.param(dist.barrier, False, marks=pytest.mark.long),
    ],
)
def test_members_find_the_loss_of_a_killed_one_by_themselves(
    call: Callable[[], Any], compiled: bool
) -> None:
    def train(peer: Peer) -> None:
        follow(peer, 2, 0, 1)
        if compiled:
            peer.model.compile(backend="aot_eager")
        for step in peer.session.steps(numbers(7, batch_size=1), epochs=1):
            with step:
                if step.index == 1 and peer.session.generation == 1:
                    if peer.seat.rank == 2:
                        die()
                    call()
                backward(peer, step)
                peer.update()
        assert (peer.session.generation, peer.session.committed) == (2, 3)
        peer.seat.exchange("done")

    train_together(train, train, train)


@pytest.mark.parametrize("place", ["block", "call"])
@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
@in_sessions(2)
def test_a_scripts_own_broken_connection_is_not_the_loss_of_the_group(
    peer: Peer, place: str, ranks: tuple[int, ...]
) -> None:
    def read() -> None:
        if peer.seat.rank in ranks:
            try:
                raise ConnectionResetError("Connection reset by peer")
            except ConnectionResetError as error:
                raise RuntimeError("read of shard 3: Connection reset by peer") from error
        peer.seat.exchange("raised")
        raise RuntimeError("read of shard 3: end of the test")

    def train() -> None:
        for step in peer.session.steps(numbers(8, batch_size=1), epochs=1):
            with step:
                if place == "block":
                    read()
                backward(peer, step)
            peer.session.run(read)

    with pytest.raises(RuntimeError, match="read of shard 3"):
        train()
    assert peer.session.generation == 1
    peer.seat.exchange("raised")


class Handled(Dataset[torch.Tensor]):
    """Each sample tells whether the process that loads it was started while an exception was being
    handled, which would be shown with each error of that process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(sys.exc_info()[0] is not None)], dtype=torch.float64)


@in_sessions(2)
def test_loader_processes_do_not_start_while_the_loss_of_a_group_is_handled(peer: Peer) -> None:
    follow(peer, 2)
    found = []
    data = DataLoader(Handled(), batch_size=1, num_workers=1)
    for step in peer.session.steps(data, epochs=1):
        with step:
            for inputs in step.batches():
                found.append(inputs.item())
                if peer.session.generation == 1 and step.index == 1:
                    cut(peer)
                step.backward(peer.model(inputs).mean())
    assert peer.session.generation == 2
    assert found == [0.0] * 5
    peer.seat.exchange("done")


# ---- errors that a script raises because of a lost connection


class MetricError(Exception):
    """An error of the script's own class."""


def told_from(error: Exception) -> None:
    raise MetricError from error


def told_while(_: Exception) -> None:
    raise MetricError


def told_alone(_: Exception) -> None:
    raise MetricError from None


@pytest.mark.parametrize("tell", [told_from, told_while, told_alone])
@pytest.mark.parametrize("place", ["block", "call"])
@in_sessions(2)
def test_an_error_raised_because_of_a_lost_connection_counts_as_a_loss(
    peer: Peer, place: str, tell: Callable[[Exception], None]
) -> None:
    lost = False
    follow(peer, 2)

    def lose() -> None:
        nonlocal lost
        if lost:
            return
        lost = True
        cut(peer)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            tell(error)

    for step in peer.session.steps(numbers(8, batch_size=1), epochs=1):
        with step:
            backward(peer, step)
            if place == "block":
                lose()
        if place == "call":
            peer.session.run(lose)
    assert peer.session.committed == 4
    assert peer.session.generation == 2


@pytest.mark.parametrize("place", ["block", "call"])
@in_sessions(2)
def test_an_error_after_an_earlier_lost_connection_is_raised_to_the_script(
    peer: Peer, place: str
) -> None:
    """That error was raised before the script began, so it is no cause of the script's."""

    def fail() -> None:
        cut(peer)
        raise MetricError

    def train() -> None:
        for step in peer.session.steps(numbers(8, batch_size=1), epochs=1):
            with step:
                backward(peer, step)
                if place == "block":
                    fail()
            peer.session.run(fail)

    try:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    except RuntimeError:
        with pytest.raises(MetricError):
            train()


# ---- calls above a block


@pytest.mark.parametrize("calls_below", [0, 1])
@in_sessions(2)
def test_a_call_above_a_block_is_repeated_with_a_member_that_was_still_in_the_call(
    peer: Peer, calls_below: int
) -> None:
    """That member waits in the call until the other one, whose block does not count, repeats it."""
    calls: list[int] = []
    lost = False

    def lose() -> None:
        nonlocal lost
        if not lost:
            lost = True
            peer.seat.exchange("one is in the block, the other one in the call")
            peer.announce(2)

    def evaluate(index: int) -> float:
        calls.append(index)
        total = torch.ones(1)
        dist.all_reduce(total)
        peer.session.state["calls"] = peer.session.state.get("calls", 0) + 1
        if index == 2 and peer.seat.rank == 1:
            lose()
        return total.item()

    for step in peer.session.steps(numbers(8, batch_size=1), epochs=1):
        assert peer.session.run(evaluate, step.index) == 2.0
        with step:
            if step.index == 2 and peer.seat.rank == 0:
                lose()
            backward(peer, step)
        if step.committed:
            for _ in range(calls_below):
                peer.session.run(lambda: dist.all_reduce(torch.ones(1)))
    assert calls == [0, 1, 2, 2, 3]
    mine = [peer.weight, peer.session.state["calls"], peer.session.committed]
    assert mine[1:] == [4, 4]
    assert peer.seat.exchange(mine) == [mine, mine]


@in_sessions(2)
def test_a_member_that_waits_to_compare_replicas_says_so(peer: Peer) -> None:
    """Else nobody looks for a cut link between nodes that begin to send at that moment."""
    training, waits = peer.session._training, list[float]()
    meet = membership.meet

    def noted(*arguments: Any) -> Any:
        waits.append(training.clock.waiting_s())
        return meet(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "meet", noted)
        for step in peer.session.steps(numbers(8, batch_size=1), epochs=1):
            with step:
                backward(peer, step)
                peer.update()
    assert len(waits) == 4  # after 1, 2 and 4 steps, and at the end of the loop
    assert all(wait_s > 0.0 for wait_s in waits), waits
    assert training.clock.waiting_s() == 0.0


# ---- optimizers outside of a block


@in_sessions(2)
def test_an_optimizer_step_below_the_block_with_the_blocks_gradients_is_refused(peer: Peer) -> None:
    """A member whose last reduction was lost gets the others' weights of the block's end, but no
    gradients: it would go on without the update."""
    for step in peer.session.steps(numbers(4, batch_size=1), epochs=1):
        peer.optimizer.zero_grad()
        with step:
            backward(peer, step)
        with pytest.raises(StepMisused, match="inside"):
            peer.optimizer.step()
    peer.seat.exchange("done")


@in_sessions(2)
def test_an_optimizer_may_step_between_blocks_with_gradients_of_its_own(peer: Peer) -> None:
    for step in peer.session.steps(numbers(4, batch_size=1), epochs=1):
        peer.optimizer.step()  # without gradients: the blocks have used theirs up
        peer.optimizer.zero_grad()
        with step:
            backward(peer, step)
            peer.optimizer.step()
        peer.optimizer.zero_grad()
        peer.model.module(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        peer.update()
    assert peer.session.committed == 2
    peer.seat.exchange("done")


# ---- leaving the loop


@pytest.mark.parametrize("then", ["a call", "another loop", "the end"])
@in_sessions(2)
def test_leaving_a_loop_after_a_block_that_does_not_count_is_refused(peer: Peer, then: str) -> None:
    """`step.index` is the same whether the step counts or not, so a step would be missing."""
    data = numbers(8, batch_size=1)
    for step in peer.session.steps(data, epochs=1):
        with step:
            if step.index == 2:
                peer.announce(2)
            backward(peer, step)
        if step.index == 2:
            break
    assert peer.session.committed == 2
    goes_on: dict[str, Callable[[], Any]] = {
        "a call": lambda: peer.session.run(lambda: None),
        "another loop": lambda: next(peer.session.steps(data, epochs=1)),
        "the end": peer.session._training.finish,
    }
    with pytest.raises(StepMisused, match="count"):
        goes_on[then]()
    peer.seat.exchange("done")


@in_sessions(2)
def test_leaving_the_loop_after_a_step_that_counts_is_allowed(peer: Peer) -> None:
    data = numbers(8, batch_size=1)
    lost = False
    for step in peer.session.steps(data, epochs=1):
        with step:
            if step.index == 2 and not lost:
                lost = True
                peer.announce(2)
            backward(peer, step)
        if step.committed and step.index == 2:
            break
    assert peer.session.committed == 3
    assert peer.session.run(lambda: 7) == 7
    peer.seat.exchange("done")


@in_sessions(2)
def test_ending_after_an_exception_has_left_the_block_and_the_loop_is_refused(peer: Peer) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for step in peer.session.steps(numbers(8, batch_size=1), epochs=1):
            with step:
                backward(peer, step)
                peer.optimizer.step()
                raise ZeroDivisionError
    with pytest.raises(StepMisused, match="exception"):
        peer.session._training.finish()
    peer.seat.exchange("done")


@in_sessions(2)
def test_every_nth_step_is_told_once_though_its_group_is_lost(peer: Peer) -> None:
    found, blocks = [], 0
    for step in peer.session.steps(numbers(12, batch_size=1), epochs=1):
        with step:
            blocks += 1
            if blocks in (2, 4):
                peer.announce(blocks)
            assert step.every(2) == (step.index % 2 == 1)
            backward(peer, step)
            peer.update()
        if step.every(2):
            found.append(step.index)
    assert found == [1, 3, 5]
    assert blocks == 8


@in_sessions(2)
def test_the_loaders_len_follows_the_group(peer: Peer) -> None:
    data, found = numbers(8, batch_size=1), []
    for step in peer.session.steps(data, max_steps=3):
        with step:
            if step.index == 1 and len(data) == 4:
                peer.announce(2, peer.seat.rank)
            backward(peer, step)
            peer.update()
        found.append(len(data))
    assert found == [4, 8, 8, 8]


# ---- newcomers and loops


def test_a_newcomer_skips_finished_loops_and_gets_the_results_of_calls_between() -> None:
    def script(peer: Peer, at_second: Callable[[], None]) -> tuple[list[int], list[float]]:
        indices: list[int] = []
        found: list[float] = []
        data = numbers(6, batch_size=1)
        assert list(peer.session.steps(data, epochs=0)) == []  # the group forms here
        found.append(peer.session.run(lambda: peer.weight[0] + 1.0))
        for epoch in range(3):
            for step in peer.session.steps(data, epochs=epoch + 1):
                if epoch == 1 and not indices[3:]:
                    at_second()
                with step:
                    backward(peer, step)
                    peer.update()
                if step.committed:
                    indices.append(step.index)
            if epoch < 2:
                result = peer.session.run(lambda: {"weight": peer.weight[0]})
                found.append(result.pop("weight"))
        return indices, found

    def veteran(seat: Seat) -> None:
        peer = Peer(seat)
        peer.optimizer.param_groups[0]["lr"] = 0.001
        peer.announce(1, 0, 1)
        indices, found = script(peer, lambda: peer.announce(2))
        assert indices == list(range(indices[-1] + 1))
        seat.exchange([found, peer.weight])

    def newcomer(seat: Seat) -> None:
        peer = Peer(seat)
        peer.optimizer.param_groups[0]["lr"] = 0.001
        peer.announce(2)
        indices, found = script(peer, lambda: None)
        assert indices[0] >= 3
        everybody = seat.exchange([found, peer.weight])
        assert all(other == everybody[0] for other in everybody)

    run_together(veteran, veteran, newcomer)


def test_loops_of_so_many_steps_end_at_the_same_step_for_a_newcomer_and_after_a_loss() -> None:
    """The group is lost in the last step of the second loop, and another worker joins."""

    def script(peer: Peer, at_last: Callable[[], None]) -> list[list[int]]:
        found: list[list[int]] = []
        peer.optimizer.param_groups[0]["lr"] = 0.001
        data = numbers(6, batch_size=1)
        for count in (2, 3, 4):
            found.append([])
            for step in peer.session.steps(data, max_steps=count):
                with step:
                    if step.index == 4:
                        at_last()
                        at_last = nothing
                    backward(peer, step)
                    peer.update()
                if step.committed:
                    found[-1].append(step.index)
        return found

    def veteran(seat: Seat) -> None:
        peer = Peer(seat)
        peer.announce(1, 0, 1)
        assert script(peer, lambda: peer.announce(2)) == [[0, 1], [2, 3, 4], [5, 6, 7, 8]]
        seat.exchange(peer.weight)

    def newcomer(seat: Seat) -> None:
        peer = Peer(seat)
        peer.announce(2)
        assert script(peer, nothing) == [[], [4], [5, 6, 7, 8]]
        everybody = seat.exchange(peer.weight)
        assert all(other == everybody[0] for other in everybody)

    run_together(veteran, veteran, newcomer)


def test_a_newcomers_forward_pass_is_refused_while_it_passes_loops_that_are_done() -> None:
    """Its model is not trained yet. It does not pass such a place if it asks `catching_up`."""

    def script(peer: Peer, at_second: Callable[[], None], at_end: Callable[[], None]) -> None:
        data = numbers(40, batch_size=1)
        for epoch in range(2):
            for step in peer.session.steps(data, epochs=epoch + 1):
                if epoch == 1:
                    at_second()
                with step:
                    backward(peer, step)
                    peer.update()
            at_end()

    def veteran(seat: Seat) -> None:
        peer = Peer(seat)
        peer.announce(1, 0)
        script(peer, lambda: peer.announce(2), lambda: None)

    def newcomer(seat: Seat) -> None:
        peer = Peer(seat)
        peer.announce(2)
        seen = []

        def at_end() -> None:
            seen.append(peer.session.catching_up)
            if seen[-1]:
                with pytest.raises(StepMisused, match=r"test_session_rec.*not trained yet"):
                    peer.model(torch.ones(1, 1).double())
            else:
                peer.model(torch.ones(1, 1).double())

        script(peer, lambda: None, at_end)
        assert seen == [True, False]

    run_together(veteran, newcomer)


# ---- before a save


class History:
    """A tracked object of the script's own."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.kept)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.kept = dict(state)


@pytest.mark.parametrize("kept", ["on every rank", "by each rank"])
def test_a_save_is_refused_if_one_rank_would_save_other_tensors(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "Checkpointing", partial(Checkpointing, every=3))

    def go(peer: Peer) -> None:
        history = History()
        peer.session.track(history=history)

        def train() -> None:
            for step in peer.session.steps(numbers(8, batch_size=1), epochs=1):
                with step:
                    backward(peer, step)
                if kept == "on every rank" or peer.session.rank == 1:
                    history.kept["best"] = torch.zeros(3)

        if kept == "on every rank":
            train()
            return
        named = r" \(history\.best\)" if peer.seat.rank == 1 else ""
        with pytest.raises(StepMisused, match=f"rank 1{named} would save other tensors"):
            train()
        assert peer.session.committed == 3

    train_together(go, go)


# ---- the order of samples


@pytest.mark.parametrize("differing", ["seed", "samples"])
def test_members_whose_loaders_divide_other_samples_are_refused_after_one_step(
    differing: str,
) -> None:
    """With as many steps an epoch on each rank, nothing else would show that samples are missing
    and others count twice."""

    @in_sessions(2)
    def go(peer: Peer) -> None:
        rank = peer.seat.rank
        length, seed = (12, rank) if differing == "seed" else (12 - rank, 0)

        def train() -> None:
            for step in peer.session.steps(
                numbers(length, batch_size=2, shuffle=True, seed=seed), epochs=1
            ):
                with step:
                    backward(peer, step)

        with pytest.raises(StepMisused, match=r"rank 1 divides other samples.* has 1[12] samples"):
            train()
        assert peer.session.committed == 1
        peer.seat.exchange("done")

    go()
