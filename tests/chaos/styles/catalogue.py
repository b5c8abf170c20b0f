"""Lists the styles and what is expected of each.

Every public function of a module in `scripts` is a style.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
STEPS_PER_EPOCH = 8  # of nearly all styles: 61 or 64 samples, 8 at a time


class Truth(enum.Enum):
    """What the state after each step is compared with."""

    ONE_PROCESS = "the same script, undisturbed, as a world of one"
    REPLAY = "one process that takes the ledger's steps, whose size followed the group"
    MEMBERS = "the other members only: the script draws or normalises for each worker by itself"
    REFUSED = "nothing: the job must end at once, with exit code 78 and a reason"


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """A script, and how it is judged.

    module: the module of `scripts` that has the function `name`.
    tolerance: relative to the L1 norm of a tensor, or to a thousandth of the largest norm if that
        is more; 0.0 where the problem's sums are exact.
    own_buffers: the members' buffers may differ between two broadcasts.
    kills: how many a run in `make test` has.
    breaks_off: the script leaves its loop before the end of its epochs.
    calm_until: no worker is killed before this step is committed. In it a large object changes for
        the first time, so no copy of it exists, and a loss would end the job (docs/GUIDE.md).
    """

    name: str
    module: str = ""
    truth: Truth = Truth.ONE_PROCESS
    tolerance: float = 1e-9
    own_buffers: bool = False
    kills: int = 1
    breaks_off: bool = False
    calm_until: int = -1

    def steps(self, epochs: int) -> tuple[int, int]:
        """The least and the most steps that a run may take."""
        most = epochs * STEPS_PER_EPOCH
        return (most // 2 if self.breaks_off else most), most


_EXACT = 0.0
_PARTICULAR = (
    Style(name="plain_sgd", kills=2),
    Style(name="grad_scaler", tolerance=_EXACT, kills=2),
    Style(name="grad_scaler_two_optimizers", tolerance=_EXACT, kills=2),
    Style(name="gan", kills=2),
    Style(name="sam", kills=2),
    Style(name="schedulers_top", kills=2),
    Style(name="ema_of_distributed_model", kills=2),
    Style(name="logging_all_reduce", kills=2),
    Style(name="fp16_hook", tolerance=_EXACT),
    Style(name="bf16_hook", tolerance=_EXACT),
    Style(name="power_sgd_hook", tolerance=1e-6),
    Style(name="lbfgs", tolerance=1e-5),  # near convergence its history is rounding
    Style(name="early_stopping", breaks_off=True),
    Style(name="best_by_local_evaluation", breaks_off=True),
    Style(name="fixed_number_of_steps", breaks_off=True),
    Style(name="growing_batch", truth=Truth.REPLAY),
    Style(name="scaled_rate", truth=Truth.REPLAY, kills=2),
    Style(name="memory_bank", calm_until=3),
    Style(name="batch_norm", truth=Truth.MEMBERS, own_buffers=True),
    Style(name="batch_norm_frozen_and_thawed", truth=Truth.MEMBERS, own_buffers=True),
    Style(name="statistics_computed_again", truth=Truth.MEMBERS, own_buffers=True),
    Style(name="dropout", truth=Truth.MEMBERS),
    Style(name="weights_differ_at_first", truth=Truth.MEMBERS),
)


# Those in `make test`: one for each way in which scripts differ. Each other style resembles one.
IN_EVERY_RUN = frozenset(
    [
        "batch_norm",
        "refused_bare_forward",
        "unfreezing",
    ]
)


def _all() -> dict[str, Style]:
    particular = {style.name: style for style in _PARTICULAR}
    found = {}
    for name, module in sorted(_scripts()):
        truth = Truth.REFUSED if module == "refused" else Truth.ONE_PROCESS
        style = particular.pop(name, Style(name=name, truth=truth))
        found[name] = replace(style, module=module)
    assert not particular, f"no script for {sorted(particular)}"
    assert found.keys() >= IN_EVERY_RUN, f"no script for {sorted(IN_EVERY_RUN - found.keys())}"
    return found


def _scripts() -> Iterator[tuple[str, str]]:
    """The name and module of each style, without an import: a worker imports only its own style's
    module."""
    for path in SCRIPTS.glob("[a-z]*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield node.name, path.stem


STYLES = _all()
