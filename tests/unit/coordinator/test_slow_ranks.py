"""Slow ranks are recorded, and replaced if the job wants it and can spare them."""

from __future__ import annotations

import math

from elastic.coordinator.holdups import SlowRanks
from elastic.core.coordinator import events as ev
from elastic.core.membership import ChangeReason, Generation, Member
from elastic.v1 import job_pb2 as pb
from tests.unit.coordinator.agents import Diary


def group(number: int, *workers: str) -> Generation:
    members = tuple(
        Member(worker=w, node=f"n{slot}@01", slot=slot, endpoint=f"{w}:1")
        for slot, w in enumerate(workers)
    )
    return Generation(number=number, incarnation="i", members=members, reason=ChangeReason.STARTED)


class Place:
    """A group whose member in slot 1 waits long for its data."""

    def __init__(self, *, replaces: bool = False, may_replace: bool = True) -> None:
        self.diary, self.posted = Diary(), list[ev.Event]()
        self.current: Generation | None = group(1, "a", "b", "c")
        self.now, self.step = 0.0, 0
        self.slow_ranks = SlowRanks(
            self.diary.journal,
            replaces=replaces,
            post=self.posted.append,
            current=lambda: self.current,
            may_replace=lambda _worker: may_replace,
            clock=lambda: self.now,
        )

    def train(self, steps: int = 64, late_s: float = 0.03) -> None:
        assert self.current is not None
        for _ in range(steps // 8):
            self.step += 8
            for slot, member in enumerate(self.current.members):
                more = late_s if slot == 1 else 0.0
                pace = pb.Pace(
                    generation=self.current.number,
                    committed=self.step,
                    steps=self.step,
                    total_s=(0.1 + late_s) * self.step,
                    data_s=more * self.step,
                    wait_s=(late_s - more) * self.step,
                    arrivals=self.step,
                    reductions=self.step,
                )
                self.slow_ranks.heard(member.worker, pace)

    def actions(self) -> list[str]:
        return [told["action"] for told in self.diary.of("straggler")]


def test_a_slow_rank_is_recorded_once_and_again_when_it_is_over() -> None:
    place = Place()
    place.train()
    (told,) = place.diary.of("straggler")
    assert (told["rank"], told["worker"], told["node"]) == (1, "b", "n1")
    assert (told["slow_in"], told["action"], told["since_step"]) == ("data", "report", 8)
    assert told["verdict"] == (
        "rank 1 (node n1) holds up every step by 30 of 130 ms, since step 8, by loading data"
    )
    assert not place.posted
    (shown,) = place.slow_ranks.to_pb()
    assert (shown.rank, shown.slow_in, shown.verdict) == (1, "data", told["verdict"])
    place.slow_ranks.heard("b", pb.Pace())
    place.current = group(2, "a", "c")
    assert not place.slow_ranks.now
    (over,) = place.diary.of("straggler_over")
    assert (over["worker"], over["node"]) == ("b", "n1")


def test_slow_ranks_are_replaced_if_wanted_but_at_most_twice_an_hour() -> None:
    place, fresh = Place(replaces=True), iter("defgh")
    for number in range(2, 6):
        place.train()
        place.current, place.step = group(number, "a", next(fresh), "c"), 0
    assert place.actions() == ["replace", "replace", "report", "report"]
    assert [e.worker for e in place.posted if isinstance(e, ev.StragglerFound)] == ["b", "d"]
    place.now += 3600.0
    place.train()
    assert place.actions()[-1] == "replace"


def test_a_slow_rank_that_the_job_cannot_spare_is_only_reported() -> None:
    place = Place(replaces=True, may_replace=False)
    place.train()
    assert place.actions() == ["report"]
    assert not place.posted


def test_figures_that_make_no_sense_are_ignored() -> None:
    place = Place()
    for bad in (math.nan, math.inf):
        place.slow_ranks.heard("a", pb.Pace(generation=1, committed=8, steps=8, total_s=bad))
    place.slow_ranks.heard("nobody", pb.Pace(generation=1, committed=8, steps=8))
    place.current = None
    place.slow_ranks.heard("a", pb.Pace(generation=1, committed=8, steps=8))
    assert not place.diary.entries
