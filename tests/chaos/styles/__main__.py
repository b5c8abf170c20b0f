"""Run training scripts of all styles, kill their workers at random, and report what is wrong.

Example: `python -m tests.chaos.styles --style gan --kills 10 --seed 7`
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from tests.chaos.styles.catalogue import STYLES, Style, Truth
from tests.chaos.styles.checks import wrong_in
from tests.chaos.styles.running import Run, as_job, epochs_for, new_folder, story, undisturbed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.styles", description=__doc__)
    parser.add_argument("--style", action="append", choices=[*STYLES], help="default: all")
    parser.add_argument("--kills", type=int, default=1, help="kills in each style's run; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills' times and victims")
    parser.add_argument("--epochs", type=int, help="default: enough for the kills")
    parser.add_argument("--out", type=Path, help="where runs leave their files")
    parser.add_argument("--large", action="store_true", help="treat all tensors as large ones")
    parser.add_argument(
        "--nccl-manners", action="store_true", help="with a backend that behaves like NCCL"
    )
    parser.add_argument("--story", action="store_true", help="print events and logs of failures")
    options = parser.parse_args()
    styles = [STYLES[name] for name in options.style or STYLES]
    out = options.out or new_folder()
    began = time.monotonic()
    epochs = options.epochs or epochs_for(options.kills)
    ones = undisturbed(styles, out, {style.name: epochs for style in styles})
    workers = ["--large"] * options.large + ["--nccl-manners"] * options.nccl_manners
    failed = 0
    for style in styles:
        kills = 0 if style.truth is Truth.REFUSED else options.kills
        job = as_job(style, out, kills=kills, seed=options.seed, epochs=epochs, options=workers)
        wrong = wrong_in(job, ones[style.name])
        failed += bool(wrong)
        print(_line(style, job, wrong), flush=True)
        for each in wrong:
            print(f"    {each}", flush=True)
        if wrong and options.story:
            print(story(job), flush=True)
    took_s = time.monotonic() - began
    print(f"{len(styles) - failed} passed, {failed} failed in {took_s:.0f} s; files in {out}")
    return 1 if failed else 0


def _line(style: Style, job: Run, wrong: list[str]) -> str:
    recovered = [e["total_s"] for e in job.named("recovered")]
    formed = job.named("generation_formed")
    joined = sum(e["reason"] == "member_joined" for e in formed)
    words = [
        f"{'FAIL' if wrong else 'ok':4} {style.name:34}",
        f"{job.took_s:5.1f} s, {len(job.kills)} kills, {len(formed)} groups, {joined} joins",
    ]
    if recovered:
        median, most = statistics.median(recovered), max(recovered)
        words.append(f"recovered in {median:.3f} s (median), {most:.3f} s (most)")
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
