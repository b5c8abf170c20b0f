"""The scripts of docs/RECIPES.md train: each alone, and as a job whose workers are killed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from elastic.worker import session as sessions
from tests.integration.running import Place
from tests.job_process import ROOT, WITH_COMPILER

PAGE = (ROOT / "docs" / "RECIPES.md").read_text()
SHARED, *_ = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
RECIPES = dict(
    re.findall(r"^## (.+?)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
)
COMPILES = "Compilation"
KILLED_AFTER = 8  # steps


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where recipes run, with the files that some read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shapes = {"0.weight": (32, 8), "0.bias": (32,), "2.weight": (9, 32), "2.bias": (9,)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, "base.safetensors")
    with open("train.jsonl", "w") as out:
        for n in range(200):
            row = {"inputs": torch.randn(8).tolist(), "label": n % 3}
            out.write(json.dumps(row) + "\n")
    return tmp_path


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """elastic.init() returns a session of its own in this test."""
    monkeypatch.setattr(sessions, "_current", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if sessions._current is not None:
        sessions._current.close()


def test_every_recipe_is_found() -> None:
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert list(RECIPES) == headings
    assert len(headings) >= 15
    linked = re.findall(r"^\[.*?\)\s·|\[([^]]+)\]\(#", PAGE, re.MULTILINE)
    assert len(linked) == len(headings)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n == COMPILES else n for n in RECIPES]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, as it compiles
@pytest.mark.usefixtures("fresh")
def test_a_recipe_trains_alone(folder: Path, name: str) -> None:
    script = SHARED + RECIPES[name]
    exec(compile(script, str(folder / "recipe.py"), "exec"), {"__name__": "__main__"})
    session = sessions._current
    assert session is not None
    assert session.committed > KILLED_AFTER
    session._training.finish()


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [name for name in RECIPES if name != COMPILES])
def test_a_recipe_trains_as_a_job_through_the_loss_of_rank_0(
    place: Place, folder: Path, name: str
) -> None:
    script = folder / "recipe.py"
    slow = re.sub(r"(?m)^( +)with step:$", r"\1time.sleep(0.1)\n\1with step:", RECIPES[name])
    script.write_text(f"import os, time\nos.chdir({str(folder)!r})\n" + SHARED + slow)
    job = place.start(
        script, nproc=3, options=("--ledger", folder / "ledger.jsonl"), **WITH_COMPILER
    )
    ledger = folder / "ledger.jsonl"
    job.wait_for(lambda: job.members() and ledger.exists(), "a group")
    while len(ledger.read_text().splitlines()) < KILLED_AFTER:
        assert job.process.poll() is None, job.story()
    job.kill_worker(job.members()[0])
    assert job.wait() == 0, job.story()
    assert len(job.named("worker_failed")) == 1
