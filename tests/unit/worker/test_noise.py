"""Default generators (dropout, augmentation) go on after a resume, and never repeat themselves."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic.checkpoint import catalog
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.directory import open_directory
from elastic.worker.state import generators
from elastic.worker.state.checkpointing import Checkpointing
from tests.unit.checkpoint.manifests import make_manifest
from tests.unit.worker.together import Seat, run_together
from tests.unit.worker.training_together import Peer, numbers

CPU = torch.device("cpu")
SAVED_AT = 3
Drawn = dict[str, list[float]]


def seed(number: int) -> None:
    """Do what scripts do: the same on every rank."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


class Saving(Peer):
    """A peer that saves at step SAVED_AT, and goes on from a checkpoint in `root`."""

    def __init__(self, seat: Seat, root: Path) -> None:
        self.root = root
        self.sent: list[Any] = []
        super().__init__(
            seat,
            checkpoints=Checkpointing(
                open_directory(str(root)),
                worker=f"w{seat.rank}",
                every=SAVED_AT,
                send=lambda **kind: self.sent.append(kind),
            ),
        )

    def commit(self) -> None:
        """Do the coordinator's part: commit what all members have written."""
        self.control.checkpoints.wait_idle()
        files = [
            [f.name, f.size_bytes, f.xxh3_128]
            for kind in self.sent
            for f in kind["shard_saved"].files
        ]
        of_all = self.seat.exchange(files)
        if self.seat.rank == 0:
            digests = [
                FileDigest(name=n, size_bytes=s, xxh3_128=x) for each in of_all for n, s, x in each
            ]
            manifest = make_manifest(SAVED_AT, len(of_all), digests)
            catalog.commit(open_directory(str(self.root)), manifest)
        self.seat.exchange("committed")


def drawn(peer: Peer, *, until: int = 5, then: Callable[[int], None] = lambda _: None) -> Drawn:
    """Train until so many steps are committed. Return what this rank drew, by the step's index."""
    found: Drawn = {}
    for step in peer.session.steps(numbers(64, batch_size=1, global_batch=6), epochs=1):
        with step:
            found[str(step.index)] = [torch.rand(1).item(), np.random.rand(), random.random()]
            for (inputs,) in step.batches():
                step.backward(peer.model(inputs).square().mean())
            peer.update()
        then(step.index)
        if peer.session.committed >= until:
            break
    return found


def job(root: Path, count: int) -> list[Drawn]:
    """Run a job of `count` workers, from the checkpoint in `root` on if there is one. Return what
    each rank drew."""
    results = root / f"drawn-by-{count}.json"
    resumes = bool(catalog.list_checkpoints(open_directory(str(root))))

    def part(seat: Seat) -> None:
        seed(7)
        peer = Saving(seat, root)
        peer.announce(1)

        def commit(index: int) -> None:
            if index == SAVED_AT and not resumes:  # the block after the save
                peer.commit()

        of_all = seat.exchange(drawn(peer, then=commit))
        if seat.rank == 0:
            results.write_text(json.dumps(of_all))

    run_together(*[part] * count)
    found: list[Drawn] = json.loads(results.read_text())
    return found


def test_noise_goes_on_after_a_resume_at_the_same_size_and_is_new_at_another(
    tmp_path: Path,
) -> None:
    undisturbed = job(tmp_path, 2)
    resumed = job(tmp_path, 2)
    steps = [str(step) for step in range(SAVED_AT, 5)]
    assert [list(rank) for rank in resumed] == [steps] * 2
    for before, after in zip(undisturbed, resumed, strict=True):
        assert after == {step: before[step] for step in steps}

    larger, again = job(tmp_path, 3), job(tmp_path, 3)
    assert larger == again, "the same seed, rank and step give the same noise"
    for kind in range(3):
        others = [n[kind] for rank in undisturbed for n in rank.values()]
        new = [n[kind] for rank in larger for n in rank.values()]
        assert len(set(new)) == len(new)
        assert not set(new) & set(others)


def _joins(seat: Seat) -> None:
    """Rank 2 joins two others after SAVED_AT steps."""
    seed(7 + min(seat.rank, 1))
    peer = Peer(seat)
    if seat.rank == 2:
        seat.exchange("the others have trained")
        peer.announce(2)
    else:
        peer.announce(1, 0, 1)

    def then(index: int) -> None:
        if index == SAVED_AT - 1:
            seat.exchange("the others have trained")
            peer.announce(2)

    alone = drawn_alone(7 + min(seat.rank, 1))
    found = drawn(peer, then=then)
    if seat.rank < 2:
        assert list(found.values()) == alone, "a survivor's generators go on"
    else:
        assert list(found) == ["3", "4"]
        for kind in range(3):
            assert not {n[kind] for n in found.values()} & {n[kind] for n in alone}
    seat.exchange("done")


def drawn_alone(number: int) -> list[list[float]]:
    """What a script that was seeded with `number` draws in five steps."""
    seed(number)
    found = [[torch.rand(1).item(), np.random.rand(), random.random()] for _ in range(5)]
    seed(number)
    return found


def test_a_newcomer_does_not_repeat_the_noise_of_the_first_steps() -> None:
    run_together(*[_joins] * 3)


def test_a_tracked_object_that_restores_generators_itself_has_the_last_word() -> None:
    class Generators:
        def state_dict(self) -> dict[str, Any]:
            return {"torch": torch.get_rng_state()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            torch.set_rng_state(state_dict["torch"])

    def part(seat: Seat) -> None:
        seed(seat.rank)
        peer = Peer(seat)
        peer.session.track(generators=Generators())
        if seat.rank == 0:
            peer.announce(1, 0)
        else:
            seat.exchange("rank 0 has trained")
            peer.announce(2)

        def then(index: int) -> None:
            if index == SAVED_AT - 1:
                seat.exchange("rank 0 has trained")
                peer.announce(2)

        found = drawn(peer, then=then)
        of_all = [list(n.values())[-1][0] for n in seat.exchange(found)]
        assert of_all[0] == of_all[1], "both have the tracked generator"

    run_together(part, part)


@pytest.mark.parametrize("numpy", ["MT19937", "PCG64"])
def test_states_of_generators_travel_as_json(numpy: str) -> None:
    module: Any = np.random
    before = module.get_bit_generator()
    module.set_bit_generator(getattr(np.random, numpy)(3))
    try:
        np.random.standard_normal()  # leaves a second value in the generator
        random.gauss(0, 1)
        saved = json.loads(json.dumps(generators.states(CPU)))
        expected = _each()
        generators.Noise(seed=1, saved=saved).put_in_place(CPU)
        assert _each() == expected
    finally:
        module.set_bit_generator(before)


@pytest.mark.parametrize("saved", [{}, {"torch": "AAAA", "numpy": {"state": 1}, "python": [1]}])
def test_states_that_do_not_fit_leave_seeded_generators(saved: Any) -> None:
    generators.seed_all(5, CPU)
    expected = _each()
    generators.Noise(seed=5, saved=saved).put_in_place(CPU)
    assert _each() == expected


def _each() -> list[float]:
    return [torch.rand(1).item(), np.random.standard_normal(), random.gauss(0, 1)]
