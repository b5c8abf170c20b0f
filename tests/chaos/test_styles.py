"""Training scripts as people write them end as if undisturbed when workers are killed at random.

To repeat one with its kills: python -m tests.chaos.styles --style NAME --kills N --seed N
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.styles import checks, running
from tests.chaos.styles.catalogue import IN_EVERY_RUN, STYLES, Style, Truth

MANY_KILLS = 10
_AT_ONCE = 2  # jobs at a time; they pause more than they compute
_FIRST, _MANY = "test_a_style_comes_through_kills", "test_a_style_comes_through_many_kills"


class Ahead:
    """Runs the selected styles in order, in threads, while the tests judge earlier results."""

    def __init__(self, out: Path, kills: dict[str, int], seed: int) -> None:
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        styles = [STYLES[name] for name in kills]
        usual = [s for s in styles if s.truth is not Truth.REFUSED]
        epochs = {name: running.epochs_for(number) for name, number in kills.items()}
        self._ones = self._pool.submit(running.undisturbed, usual, out, epochs)
        self._jobs: dict[str, list[Future[running.Run]]] = {
            style.name: [
                self._pool.submit(
                    running.as_job,
                    style,
                    out,
                    kills=number,
                    seed=seed,
                    epochs=epochs[style.name],
                )
                for number in self._runs(style, kills[style.name])
            ]
            for style in styles
        }

    def judge(self, style: Style) -> None:
        """Fail with the whole story if anything is wrong with the runs of the style."""
        for future in self._jobs[style.name]:
            job = future.result()
            wrong = checks.wrong_in(job, self._ones.result().get(style.name, job))
            if wrong:
                raise AssertionError("\n".join([f"{style.name}:", *wrong, running.story(job)]))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    @staticmethod
    def _runs(style: Style, kills: int) -> list[int]:
        """The number of kills in each run. With many kills there is also an undisturbed run."""
        if style.truth is Truth.REFUSED:
            return [0]
        return [0, kills] if kills >= MANY_KILLS else [kills]


def _selected(request: pytest.FixtureRequest, test: str) -> list[Style]:
    found = [i for i in request.session.items if getattr(i, "originalname", "") == test]
    return [STYLES[item.callspec.params["name"]] for item in found]


@pytest.fixture(scope="module")
def ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ahead]:
    kills = {style.name: style.kills for style in _selected(request, _FIRST)}
    ahead = Ahead(tmp_path_factory.mktemp("styles"), kills, seed=0)
    yield ahead
    ahead.close()


@pytest.fixture(scope="module")
def many_kills_ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ahead]:
    kills = {style.name: MANY_KILLS for style in _selected(request, _MANY)}
    ahead = Ahead(tmp_path_factory.mktemp("styles"), kills, seed=1)
    yield ahead
    ahead.close()


@pytest.mark.timeout(480)  # the first test waits for all undisturbed worlds of one
@pytest.mark.parametrize(
    "name",
    [n if n in IN_EVERY_RUN else pytest.param(n, marks=pytest.mark.long) for n in STYLES],
)
def test_a_style_comes_through_kills(ahead: Ahead, name: str) -> None:
    ahead.judge(STYLES[name])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", STYLES)
def test_a_style_comes_through_many_kills(many_kills_ahead: Ahead, name: str) -> None:
    many_kills_ahead.judge(STYLES[name])
