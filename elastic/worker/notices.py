"""Words the events by which a worker tells the operator what it finds out about its script."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.worker.group.membership import Membership
from elastic.worker.reporter import Reports


class Notices:
    """Sends these events. Where all members find the same, only rank 0, the oldest one, does so."""

    def __init__(self, reports: Reports, membership: Membership) -> None:
        self._reports = reports
        self._membership = membership

    def copies_cost(self, names: Sequence[str], size_bytes: int, copy_s: float) -> None:
        """Each step copies this much of these objects."""
        self._copies(
            names,
            size_bytes,
            copy_s,
            "these change before the step's last collective, so every step copies them; make all "
            "collectives, step.mean() included, before the first optimizer.step() to avoid that",
        )

    def copies_are_slow(self, names: Sequence[str], copy_s: float) -> None:
        """State takes long to copy although its tensors are small."""
        self._copies(
            names,
            0,
            copy_s,
            "every step copies these twice, because they are many objects or NumPy's arrays, whose "
            "changes cannot be seen; keep them in a few tensors, or outside of what is tracked",
        )

    def _copies(self, names: Sequence[str], size_bytes: int, copy_s: float, advice: str) -> None:
        if self._membership.require_group().rank != 0:
            return
        self._reports.notice(
            "step_copies_state",
            {
                "names": ", ".join(names),
                "bytes": str(size_bytes),
                "copy_ms": f"{copy_s * 1000:.3g}",
                "advice": advice,
            },
        )

    def untracked(self, names: str, advice: str) -> None:
        """Objects of these types change and are not tracked."""
        self._reports.notice("untracked_state", {"names": names, "advice": advice})

    def state_differed(self, step: int, names: Sequence[str]) -> None:
        """This member's state, which is replaced, differs in these names from what others hold."""
        self._reports.notice(
            "state_differed",
            {"step": str(step), "names": ", ".join(names[:10]), "differing": str(len(names))},
        )

    def left_early(
        self, step: int, *, within: str, place: str, lasts_s: float, undone: bool
    ) -> None:
        """The script was stopped for good at `place`, which is `within` the step."""
        self._reports.notice(
            "left_early",
            {
                "step": str(step),
                "within": within,
                "place": place,
                "lasts_s": f"{lasts_s:.1f}",
                "undone": str(undone).lower(),
            },
        )
