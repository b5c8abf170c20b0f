"""An undisturbed step makes few Python calls, which are what elastic adds to a short step."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import elastic
from elastic.worker.session import Session
from elastic.worker.training import Training
from tests.unit.worker.together import Seat
from tests.unit.worker.training_together import PeerControl, numbers

SAMPLES_OF_A_STEP = 64  # 32 steps are planned at once
LEARNT = 130  # steps: the undo learns at the 128th, and not again before the 256th
COUNTED = 96
MOST_CALLS = 186.0  # 180 with Python 3.11
ROOT = Path(__file__).parents[3]
OURS = (str(Path(elastic.__file__).parent), "<string>")  # and code that dataclasses generate


def require_few_calls(seat: Seat) -> None:
    control = PeerControl(seat)
    session = Session(Training(control))
    model = session.distribute(
        nn.Sequential(nn.Linear(1, 160), nn.Linear(160, 160), nn.Linear(160, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    control.membership.announce(seat.generation(1))
    data = numbers(SAMPLES_OF_A_STEP * (LEARNT + COUNTED + 10), batch_size=SAMPLES_OF_A_STEP)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            calls[frame.f_code.co_name] += 1

    try:
        for step in session.steps(data, epochs=1):
            if step.index == LEARNT:
                sys.setprofile(count)
            if step.index == LEARNT + COUNTED:
                break
            with step:
                for (inputs,) in step.batches():
                    step.backward(model(inputs.float() / len(data.dataset)).square().mean())
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step.report(loss=1.0)
    finally:
        sys.setprofile(None)
    each = calls.total() / COUNTED
    assert each <= MOST_CALLS, (each, calls.most_common(20))


def test_an_undisturbed_step_makes_few_calls() -> None:
    """The test runs in its own process, because sessions of other tests leave hooks in torch."""
    program = (
        "from tests.unit.worker.together import run_together\n"
        f"from {__name__} import require_few_calls\n"
        "run_together(require_few_calls)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
