"""session.mean, gather, on_rank0 and evaluate: all members get one result, whoever is lost."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from elastic.errors import ConfigurationError, StepMisused
from elastic.worker.agreed_calls import AgreedCall
from elastic.worker.control import LocalControl
from elastic.worker.group.process_group import Group
from elastic.worker.group.transfer import pack
from elastic.worker.session import Session
from elastic.worker.training import Training
from tests.unit.worker.together import die
from tests.unit.worker.training_together import Peer, in_sessions, numbers
from tests.waiting import eventually

SAMPLES = 23


def begin(peer: Peer) -> Session:
    """Let the group form."""
    assert list(peer.session.steps(numbers(4, batch_size=1), epochs=0)) == []
    return peer.session


def values(count: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(float(count), dtype=torch.float64))


@pytest.fixture
def session() -> Iterator[Session]:
    """A session without an agent, whose group has formed."""
    session = Session(Training(LocalControl()))
    model = session.distribute(torch.nn.Linear(1, 1))
    session.track(model=model)
    assert list(session.steps(numbers(4), epochs=0)) == []
    yield session
    session.close()


@in_sessions(3)
def test_a_mean_is_weighted_and_the_same_on_every_worker(peer: Peer) -> None:
    session, rank = begin(peer), peer.seat.rank
    assert session.mean(rank) == 1.0
    assert session.mean(torch.tensor([float(rank)]), weight=rank) == pytest.approx(5 / 3)
    assert session.mean(math.nan if rank == 1 else 4.0, weight=rank != 1) == 4.0
    assert math.isnan(session.mean(1.0, weight=0))
    assert session.mean(torch.tensor([rank, 2 * rank])).tolist() == [1.0, 2.0]
    with pytest.raises(StepMisused, match=r"shape \(2,\) on rank 1 and \(3,\) on rank 0"):
        session.mean(torch.zeros(2 if rank == 1 else 3))
    peer.seat.exchange("done")


@in_sessions(3)
def test_values_of_any_size_are_gathered_in_the_order_of_ranks(peer: Peer) -> None:
    session, rank = begin(peer), peer.seat.rank
    found = session.gather({"name": f"r{rank}", "rows": torch.full((rank, 2), 0.5), 3: (rank,)})
    assert [each["name"] for each in found] == ["r0", "r1", "r2"]
    assert [each["rows"].tolist() for each in found] == [[[0.5, 0.5]] * n for n in range(3)]
    assert [each[3] for each in found] == [(0,), (1,), (2,)]
    peer.seat.exchange("done")


def test_calls_refuse_what_they_cannot_send_or_read(session: Session) -> None:
    with pytest.raises(ConfigurationError, match=r"session\.gather\(\) .* object"):
        session.gather(object())
    with pytest.raises(ConfigurationError, match=r"session\.on_rank0\(.*object"):
        session.on_rank0(object)
    with pytest.raises(ConfigurationError, match="number or a tensor"):
        session.mean([1.0])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the weight -1"):
        session.mean(1.0, weight=-1)
    with pytest.raises(ConfigurationError, match=r"session\.evaluate needs a dataset"):
        session.evaluate(len, numbers(4))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="batch_size=0"):
        session.evaluate(len, values(), batch_size=0)
    with pytest.raises(ConfigurationError, match=r"session\.evaluate: .*sampler"):
        session.evaluate(len, values(), sampler=[1])
    with pytest.raises(ConfigurationError, match="list for 'a'"):
        session.evaluate(lambda _: {"a": [1]}, values())


def test_calls_are_refused_in_blocks_and_before_the_first_loop(session: Session) -> None:
    fresh = Session(Training(LocalControl()))
    with pytest.raises(ConfigurationError, match=r"session\.mean\(\) was called before"):
        fresh.mean(1)
    fresh.close()
    step = next(iter(session.steps(numbers(4), epochs=1)))
    with pytest.raises(StepMisused, match=r"session\.gather\(\) was called inside"), step:
        session.gather(1)


def test_an_evaluation_counts_each_sample_once_in_eval_mode_and_without_gradients(
    session: Session,
) -> None:
    (model,) = session._training.models
    model.module.train()  # type: ignore[union-attr]
    seen: list[float] = []

    def look(batch: list[torch.Tensor]) -> dict[str, Any]:
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.extend(batch[0].tolist())
        return {
            "mean": batch[0].mean(),
            "one": 1,
            "by_token": (batch[0].max(), batch[0].sum()),
            "both": torch.stack([batch[0].mean(), (batch[0] > 10).double().mean()]),
        }

    state = torch.get_rng_state()
    found = session.evaluate(look, values(), batch_size=5)
    assert seen == [float(n) for n in range(SAMPLES)]
    assert (found["mean"], found["one"]) == (11.0, 1.0)
    parts = values().tensors[0].split(5)
    by_token = sum(float(part.max() * part.sum()) for part in parts) / sum(range(SAMPLES))
    assert found["by_token"] == pytest.approx(by_token, rel=1e-15)
    assert found["both"].tolist() == [11.0, 12 / SAMPLES]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert session.evaluate(lambda batch: batch[0].mean(), values(), batch_size=50) == 11.0


@in_sessions(3)
def test_members_divide_an_evaluation_also_if_one_has_no_batch(peer: Peer) -> None:
    session = begin(peer)
    for batch_size in (3, 20):
        seen: list[float] = []

        def look(batch: list[torch.Tensor], seen: list[float] = seen) -> torch.Tensor:
            seen.extend(batch[0].tolist())
            return peer.model(batch[0].unsqueeze(1)).sum() + batch[0].mean()

        assert session.evaluate(look, values(), batch_size=batch_size) == 11.0
        everything = peer.seat.exchange(seen)
        assert sorted(itertools.chain(*everything)) == [float(n) for n in range(SAMPLES)]


class Averaging(torch.nn.Module):
    """Has a weight and, as BatchNorm does, a buffer that each rank sets by itself."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.register_buffer("average", torch.tensor(value, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.average


@in_sessions(2)
def test_an_evaluation_has_the_buffers_of_rank_0(peer: Peer) -> None:
    session = peer.session
    model = session.distribute(Averaging(100.0 * peer.seat.rank))
    session.track(other=model)
    begin(peer)
    model.average.fill_(100.0 * peer.seat.rank)  # type: ignore[operator,union-attr]
    assert session.evaluate(lambda b: model(b[0]).mean(), values(), batch_size=2) == 11.0
    peer.seat.exchange("done")


@in_sessions(3)
def test_an_evaluation_goes_on_with_the_batches_of_a_lost_member(peer: Peer) -> None:
    """The last of three members ends in its second batch."""
    session, seat = begin(peer), peer.seat
    seen: list[float] = []

    def look(batch: list[torch.Tensor]) -> torch.Tensor:
        seen.extend(batch[0].tolist())
        if len(seen) == 4:
            seat.exchange("all are in it")
            if seat.rank == 2:
                die()
            peer.announce(2, 0, 1)
        return batch[0].mean()

    assert session.evaluate(look, values(), batch_size=2) == 11.0
    assert len(seen) == len({*seen}), "what was done is not done again"
    assert session.world_size == 2
    everything = seat.exchange(seen)
    assert sorted(itertools.chain(*everything)) == [float(n) for n in range(SAMPLES)]


@in_sessions(3)
def test_another_member_repeats_the_work_of_a_rank_0_that_was_lost(
    peer: Peer, tmp_path: Path
) -> None:
    session, seat, calls = begin(peer), peer.seat, tmp_path / "calls"

    def work(number: int) -> dict[str, Any]:
        assert session.rank == 0
        with calls.open("a") as file:
            file.write(f"{seat.rank} ")
        if seat.rank == 0:
            die()
        time.sleep(0.1)
        return {"by": seat.rank, "of": torch.tensor([number])}

    def announce() -> None:
        eventually(calls.exists)
        peer.announce(2, 1, 2)

    threading.Thread(target=announce).start()
    for number in (7, 8):
        assert session.on_rank0(work, number) == {"by": 1, "of": torch.tensor([number])}
    seat.exchange("done")
    assert calls.read_text() == "0 1 1 "


@in_sessions(3)
def test_rank_0_does_not_repeat_its_work_if_another_member_is_lost_meanwhile(
    peer: Peer, tmp_path: Path
) -> None:
    session, seat = begin(peer), peer.seat
    begun, lost, calls = tmp_path / "begun", tmp_path / "lost", []

    def work() -> str:
        calls.append(session.rank)
        begun.touch()
        eventually(lost.exists)
        return "done"

    def lose() -> None:
        eventually(begun.exists)
        if seat.rank == 2:
            lost.touch()
            die()
        eventually(lost.exists)
        peer.announce(2, 1, 0)  # another rank 0 does not repeat it, either

    threading.Thread(target=lose).start()
    assert session.on_rank0(work) == "done"
    assert (session.world_size, calls) == (2, [0] if seat.rank == 0 else [])
    seat.exchange("done")


@in_sessions(2)
def test_those_that_wait_for_rank_0_are_in_no_collective_and_no_meeting(peer: Peer) -> None:
    """Otherwise the coordinator would take it for one that hangs."""
    session = begin(peer)
    training = session._training
    counts = []

    def watch() -> None:
        time.sleep(0.4)
        counts.extend([training.collectives(), training.clock.waiting_s()])

    watcher = threading.Thread(target=watch)
    watcher.start()
    session.on_rank0(time.sleep, 0.8)
    watcher.join()
    mine, others = peer.seat.exchange(counts)
    assert mine == others
    assert mine[1] == 0.0


def test_results_of_samples_in_place_of_means_are_refused(session: Session) -> None:
    with pytest.raises(ConfigurationError, match=r"shapes \(2,\) and \(\); return the mean"):
        session.evaluate(lambda batch: batch[0], values(3), batch_size=2)
    assert session.evaluate(lambda batch: batch[0], values(3)) == 1.0
    by_shape = iter([torch.tensor([1.0]), 4.0, torch.tensor(1.0)])
    assert session.evaluate(lambda _: next(by_shape), values(3)) == 2.0


@in_sessions(2)
def test_results_whose_shapes_differ_between_members_are_refused(peer: Peer) -> None:
    session = begin(peer)
    with pytest.raises(ConfigurationError, match=r"shapes \(2,\) and \(\) for 'losses'"):
        session.evaluate(lambda batch: {"losses": batch[0]}, values(3), batch_size=2)
    peer.seat.exchange("done")


@in_sessions(3)
def test_a_result_that_one_member_has_already_is_that_of_all(peer: Peer) -> None:
    """Another computation, in a smaller group, would give another one."""
    begin(peer)
    rank = peer.seat.rank

    def compute(_: Group, _keep: object) -> bytes:
        raise AssertionError("a member has the result")

    call = AgreedCall(peer.session._training.require_group, compute)
    call._held = pack({"rank": rank}) if rank > 0 else b""
    assert peer.session.run(call) == {"rank": 1}
    peer.seat.exchange("done")
