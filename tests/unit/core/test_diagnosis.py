"""Which rank keeps the others waiting, as the stacks of all ranks at one instant show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.diagnosis import Diagnosis, diagnose, doing, where_it_hangs
from elastic.core.whereabouts import Answer, ChildStack, Frame, Place, Whereabouts

STATE = "/src/elastic/worker/state"
LIB = "/venv/lib/python3.12/site-packages/torch"
TRAIN, DATA = "/job/train.py", "/job/data.py"
MAIN = (Frame(TRAIN, 90, "<module>"), Frame("<frozen runpy>", 88, "_run_code"))

ENGINE = (
    Frame(f"{LIB}/autograd/graph.py", 824, "_engine_run_backward"),
    Frame(f"{LIB}/_tensor.py", 626, "backward"),
    Frame("/src/elastic/worker/step.py", 141, "backward"),
    Frame(TRAIN, 60, "<module>"),
)
MEAN = (Frame("/src/elastic/worker/step.py", 143, "backward"), *MAIN)
SETTLE = (Frame("/src/elastic/worker/group/process_group.py", 300, "settle"), *MAIN)
ALL_REDUCE = (
    Frame(f"{LIB}/distributed/distributed_c10d.py", 2900, "all_reduce"),
    Frame(f"{LIB}/distributed/c10d_logger.py", 81, "wrapper"),
)
MEET = (
    Frame("/src/elastic/worker/group/membership.py", 60, "meet"),
    Frame("/src/elastic/worker/training.py", 600, "_meet_for_call"),
    *MAIN,
)
JOIN = (
    Frame("/usr/lib/python3.12/threading.py", 355, "wait"),
    Frame("/src/elastic/worker/group/membership.py", 201, "_begin_join"),
    *MAIN,
)
BUFFERS = (Frame(f"{LIB}/nn/parallel/distributed.py", 2100, "_sync_buffers"), *MAIN)
LOADER = (
    Frame("/usr/lib/python3.12/selectors.py", 415, "select"),
    Frame("/usr/lib/python3.12/multiprocessing/connection.py", 1136, "wait"),
    Frame(f"{LIB}/utils/data/dataloader.py", 1272, "_try_get_data"),
    Frame("/src/elastic/worker/data_loader.py", 178, "fetch"),
    *MAIN,
)
IDLE_CHILD = ChildStack(pid=71, frames=(Frame(f"{LIB}/utils/data/_utils/worker.py", 300, "_loop"),))
GETITEM = Frame(DATA, 41, "__getitem__")
HUNG_CHILD = ChildStack(pid=72, frames=(GETITEM, Frame(f"{LIB}/utils/data/f.py", 5, "fetch")))
LOCK = (
    Frame("/usr/lib/python3.12/threading.py", 355, "wait"),
    Frame(DATA, 12, "locked"),
    *MAIN,
)


def rank(number: int, place: Place, frames: tuple[Frame, ...], **more: object) -> Whereabouts:
    base = Whereabouts(
        rank=number,
        worker=f"w{number}",
        node="abcdefgh"[number % 8],
        place=place,
        place_s=34.2,
        committed=512,
        collectives=700,
        frames=frames,
    )
    return replace(base, **more)  # type: ignore[arg-type]


def in_backward(*numbers: int, **more: object) -> list[Whereabouts]:
    return [rank(n, Place.BACKWARD, ENGINE, **more) for n in numbers]


def odd_ranks(found: Diagnosis) -> list[int]:
    return [o.rank for o in found.odd]


def test_the_verdict_names_rank_node_and_place_and_the_ranks_that_wait() -> None:
    hung = rank(2, Place.DATA, (GETITEM, *LOADER[2:]), node="b", collectives=698)
    found = diagnose([*in_backward(0, 1, 3), hung])
    assert found.text == (
        "rank 2 (node b) has not entered the all-reduce of step 512: it is loading data, in "
        "`__getitem__`, data.py:41, for 34 s; ranks 0, 1, 3 wait for it"
    )
    assert odd_ranks(found) == [2]
    assert found.waiting == (0, 1, 3)
    assert found.odd[0].frame == GETITEM


@pytest.mark.parametrize(
    ("place", "frames", "committed", "said"),
    [
        (Place.FORWARD, (Frame(TRAIN, 47, "forward"), *MAIN), 512, "in the forward pass"),
        (Place.FORWARD, (Frame(f"{LIB}/nn/functional.py", 9, "conv"), *MAIN), 512, "train.py:90"),
        (Place.FORWARD, LOCK, 512, "`locked`, data.py:12"),
        (Place.BACKWARD, (Frame(TRAIN, 30, "backward"), *ENGINE), 512, "`backward`, train.py:30"),
        (Place.OPTIMIZER, (Frame(f"{LIB}/optim/adam.py", 5, "step"), *MAIN), 512, "train.py:90"),
        (Place.BETWEEN, (Frame(TRAIN, 80, "evaluate"), *MAIN), 512, "between two steps"),
        (Place.STARTING, MAIN, 0, "before session.steps()"),
        (Place.SAVING, (Frame(f"{STATE}/checkpointing.py", 9, "wait"),), 512, "saving"),
        (Place.DATA, LOADER, 512, "loading data"),
    ],
)
def test_a_rank_outside_of_the_collective_is_named_with_what_it_does(
    place: Place, frames: tuple[Frame, ...], committed: int, said: str
) -> None:
    hung = rank(1, place, frames, committed=committed)
    found = diagnose([*in_backward(0, 2), hung])
    assert odd_ranks(found) == [1]
    assert said in found.text
    assert found.text.endswith("ranks 0, 2 wait for it")
    assert where_it_hangs(hung) == found.odd[0].frame


@pytest.mark.parametrize("frames", [ENGINE, MEAN, SETTLE])
def test_no_rank_is_odd_when_all_wait_for_the_same_collective(frames: tuple[Frame, ...]) -> None:
    waiting = [rank(n, Place.BACKWARD, frames) for n in range(3)]
    found = diagnose(waiting)
    assert found.odd == ()
    assert found.waiting == (0, 1, 2)
    assert "their network traffic does not arrive" in found.text
    assert [where_it_hangs(r) for r in waiting] == [None] * 3


@pytest.mark.parametrize(
    ("place", "where"),
    [
        (Place.JOINING, "while joining the group"),
        (Place.MEETING, "at session.run"),
        (Place.BACKWARD, "in the backward pass of step 512"),
    ],
)
def test_ranks_that_all_wait_are_put_into_words(place: Place, where: str) -> None:
    text = diagnose([rank(n, place, ENGINE) for n in range(3)]).text
    assert text.startswith(f"all ranks wait for each other {where}, in ")
    assert diagnose([rank(0, place, ENGINE)]).text.startswith(f"rank 0 (node a) waits {where}, in ")


def test_a_rank_in_the_same_place_that_has_begun_fewer_collectives_is_odd() -> None:
    """With a GPU the backward pass runs on a thread of the engine, which has no Python stack."""
    found = diagnose([*in_backward(0, 2, collectives=702), *in_backward(1, collectives=701)])
    assert odd_ranks(found) == [1]
    assert found.waiting == (0, 2)
    assert "in the backward pass" in found.text
    assert found.odd[0].frame == Frame(TRAIN, 60, "<module>")


def test_the_stack_of_a_child_that_loads_data_tells_where_its_parent_waits() -> None:
    hung = rank(1, Place.DATA, LOADER, children=(IDLE_CHILD, HUNG_CHILD))
    found = diagnose([*in_backward(0), hung])
    assert "in `__getitem__`, data.py:41 of its child 72, for 34 s; rank 0 waits" in found.text
    assert found.odd[0].frame == GETITEM
    assert where_it_hangs(hung) == GETITEM
    elsewhere = rank(1, Place.FORWARD, LOCK, children=(HUNG_CHILD,))
    assert where_it_hangs(elsewhere) == LOCK[1]


def test_a_rank_that_waits_in_a_collective_of_its_own_is_odd() -> None:
    own = (*ALL_REDUCE, Frame(TRAIN, 51, "log_norm"), *MAIN)
    found = diagnose([*in_backward(0), rank(1, Place.FORWARD, own)])
    assert odd_ranks(found) == [1]
    words = "waits in a collective that the others have not entered, in `log_norm`, train.py:51"
    assert words in found.text
    assert found.text.endswith("rank 0 waits for it")
    assert found.odd[0].frame == own[2]


def test_a_rank_that_waits_in_another_step_is_odd_without_a_frame_of_the_script() -> None:
    found = diagnose([*in_backward(0, 2), *in_backward(1, committed=511)])
    assert odd_ranks(found) == [1]
    assert found.odd[0].frame is None


def test_a_rank_in_a_call_that_is_not_in_the_collective_of_the_others_is_odd() -> None:
    waits = (*ALL_REDUCE, Frame(TRAIN, 22, "evaluate"), *MAIN)
    hung = rank(1, Place.RUN, (Frame(TRAIN, 20, "evaluate"), *MAIN))
    freed = rank(2, Place.RUN, (Frame("/src/elastic/worker/training.py", 760, "settle"), *MAIN))
    assert odd_ranks(diagnose([rank(0, Place.RUN, waits), hung, freed])) == [1]
    found = diagnose([rank(0, Place.RUN, waits), hung])
    assert odd_ranks(found) == [1]
    assert "not reached the call that the others make after step 511" in found.text
    assert "in session.run, in `evaluate`, train.py:20" in found.text
    apart = (*ALL_REDUCE, Frame(TRAIN, 25, "evaluate"), *MAIN)
    found = diagnose([rank(n, Place.RUN, waits) for n in (0, 2)] + [rank(1, Place.RUN, apart)])
    assert odd_ranks(found) == [1]


def test_a_rank_that_does_not_come_to_a_call_or_to_a_group_is_odd() -> None:
    hung = rank(0, Place.BETWEEN, (Frame(TRAIN, 80, "log"), *MAIN))
    found = diagnose([hung, rank(1, Place.MEETING, MEET), rank(2, Place.MEETING, MEET)])
    assert odd_ranks(found) == [0]
    assert "not reached the call that the others make after step 511" in found.text
    first = [replace(r, committed=0) for r in (hung, rank(1, Place.MEETING, MEET))]
    assert "before the first step" in diagnose(first).text
    found = diagnose([hung, rank(1, Place.JOINING, JOIN)])
    assert odd_ranks(found) == [0]
    assert "not joined the new group" in found.text


def test_a_rank_that_does_not_come_to_the_broadcast_of_buffers_is_odd() -> None:
    hung = rank(0, Place.BETWEEN, (Frame(TRAIN, 80, "log"), *MAIN))
    found = diagnose([hung, rank(1, Place.FORWARD, BUFFERS)])
    assert odd_ranks(found) == [0]
    assert "not entered the collective of step 512" in found.text


def test_ranks_that_do_the_same_share_a_clause_in_the_plural() -> None:
    own = (*ALL_REDUCE, Frame(TRAIN, 51, "log_norm"), *MAIN)
    found = diagnose([*in_backward(0, 3, 4), *(rank(n, Place.FORWARD, own) for n in (1, 2))])
    assert "they wait in a collective that the others have not entered, in `log" in found.text
    silent = (rank(n, Place.FORWARD, (), answer=Answer.NONE) for n in (1, 2))
    found = diagnose([*in_backward(0), *silent])
    assert "they do not answer, last seen in the forward pass; rank 0 waits for them" in found.text
    locked = (rank(n, Place.FORWARD, LOCK, answer=Answer.SIGNALLED) for n in (1, 2))
    found = diagnose([*in_backward(0), *locked])
    assert "they do not answer, and are in the forward pass, in " in found.text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer.STOPPED, "is stopped by a signal, last seen in the forward pass"),
        (Answer.NONE, "does not answer, last seen in the forward pass"),
        (Answer.ABSENT, "cannot be asked: its agent is out of contact"),
    ],
)
def test_a_rank_that_does_not_answer_is_odd_and_is_described(answer: Answer, said: str) -> None:
    silent = rank(1, Place.FORWARD, (), answer=answer)
    found = diagnose([*in_backward(0), silent])
    assert odd_ranks(found) == [1]
    assert said in found.text
    assert found.odd[0].frame is None
    assert where_it_hangs(silent) is None


def test_a_stack_obtained_by_a_signal_counts_like_any_other() -> None:
    keeps = Frame(TRAIN, 17, "keep")
    hung = rank(1, Place.FORWARD, (keeps, *MAIN), answer=Answer.SIGNALLED)
    found = diagnose([*in_backward(0), hung])
    assert "does not answer, and is in the forward pass, in `keep`, train.py:17" in found.text
    assert where_it_hangs(hung) == keeps
    waits = rank(1, Place.BACKWARD, ENGINE, answer=Answer.SIGNALLED)
    assert diagnose([*in_backward(0), waits]).odd == ()


def test_a_rank_that_was_freed_a_moment_before_is_not_odd() -> None:
    """Another member, which heard of the new group earlier, has freed rank 0."""
    boundary = (Frame("/src/elastic/worker/training.py", 9, "_drive"), *MAIN)
    freed = rank(0, Place.BOUNDARY, boundary, place_s=0.01)
    hung = rank(2, Place.FORWARD, LOCK, place_s=2.1)
    found = diagnose([freed, *in_backward(1), hung])
    assert odd_ranks(found) == [2]
    assert found.text.endswith("ranks 0, 1 wait for it")
    busy = rank(2, Place.FORWARD, LOCK, place_s=0.01)
    assert odd_ranks(diagnose([*in_backward(0, 1), busy])) == [2]


def test_ranks_at_the_same_place_share_one_clause() -> None:
    hung = [rank(n, Place.DATA, (GETITEM, *MAIN), place_s=30.0 + n) for n in (1, 2)]
    found = diagnose([*in_backward(0, 3, 4, 5, 6), *hung])
    assert found.text == (
        "ranks 1, 2 (nodes b, c) have not entered the all-reduce of step 512: they are loading "
        "data, in `__getitem__`, data.py:41, for 31 s; ranks 0, 3 to 6 wait for them"
    )


def test_the_verdict_names_each_place_when_all_ranks_hang() -> None:
    found = diagnose(
        [rank(0, Place.DATA, (GETITEM, *MAIN)), rank(1, Place.FORWARD, (Frame(TRAIN, 47, "f"),))]
    )
    assert odd_ranks(found) == [0, 1]
    assert found.waiting == ()
    assert found.text == (
        "rank 0 (node a) is loading data, in `__getitem__`, data.py:41, for 34 s; "
        "rank 1 (node b) is in the forward pass, in `f`, train.py:47, for 34 s"
    )


def test_a_verdict_on_many_places_has_a_bounded_length() -> None:
    lost = [rank(n, Place.FORWARD, (Frame(TRAIN, n, "f"),)) for n in range(1000)]
    text = diagnose(lost).text
    assert text.endswith("and 1000 ranks in all, at 1000 places")
    assert len(text) < 1000


def test_a_group_of_one_gets_a_verdict_and_an_empty_one_gets_none() -> None:
    assert diagnose([]) == Diagnosis()
    found = diagnose([rank(0, Place.DATA, (GETITEM, *MAIN), place_s=0.1)])
    assert found.text == "rank 0 (node a) is loading data, in `__getitem__`, data.py:41"
    assert "waits in the backward pass" in diagnose(in_backward(0)).text


@pytest.mark.parametrize("place", list(Place))
@pytest.mark.parametrize("answer", list(Answer))
@pytest.mark.parametrize("frames", [(), ENGINE, LOADER, LOCK, JOIN, (Frame("<string>", 0, ""),)])
def test_any_combination_of_place_answer_and_stack_has_words(
    place: Place, answer: Answer, frames: tuple[Frame, ...]
) -> None:
    one = rank(1, place, frames, answer=answer)
    assert doing(one)
    assert "  " not in diagnose([one, *in_backward(0)]).text
    assert diagnose([one]).text


@pytest.mark.parametrize(
    ("file", "ours", "scripts"),
    [
        ("/job/train.py", False, True),
        ("train.py", False, True),
        ("/home/elastic/elastic/train.py", False, True),
        ("/src/elastic/worker/step.py", True, False),
        ("/venv/lib/python3.12/site-packages/elastic/worker/step.py", True, False),
        ("/venv/lib/python3.12/site-packages/torch/_tensor.py", False, False),
        ("/usr/lib/python3/dist-packages/numpy/x.py", False, False),
        ("/data/lib/python-jobs/train.py", False, True),
        ("/usr/lib/python3.12/threading.py", False, False),
        ("<frozen runpy>", False, False),
    ],
)
def test_a_frame_tells_whose_code_it_is_in(file: str, ours: bool, scripts: bool) -> None:
    frame = Frame(file, 1, "f")
    assert (frame.is_ours, frame.is_scripts) == (ours, scripts)
