"""The script's loops over the steps: their data, and its division among the present group."""

from __future__ import annotations

import weakref

from elastic.core.data_order import DataPosition
from elastic.core.worker.participation import Participation
from elastic.errors import ConfigurationError
from elastic.worker.data_loader import BatchPlan, BatchPlanner, DataLoader
from elastic.worker.group.models import Models
from elastic.worker.group.process_group import Group
from elastic.worker.state.job_state import JobState


class Loops:
    """Numbers the loaders of the script's loops, and plans the batches of the present loop."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._data: DataLoader | None = None
        self._epochs: int | None = None
        self._max_steps: int | None = None
        self._loaders: weakref.WeakKeyDictionary[DataLoader, int] = weakref.WeakKeyDictionary()
        self._loaders_seen = 0
        self.planner: BatchPlanner | None = None
        """Plans the batches in the present group. None between two groups, and in no loop."""

    def begin(
        self, part: Participation, data: DataLoader, epochs: int | None, max_steps: int | None
    ) -> int:
        """A loop begins. Returns the number of its loader, in order of first use."""
        self._data, self._epochs, self._max_steps = data, epochs, max_steps
        if max_steps is not None and part.took_part and not part.holds_back:
            self._state.results[_begin_of(part.loop + 1)] = part.progress.committed
        known = self._loaders.get(data)
        if known is None:  # even if each epoch has a new loader
            known = self._loaders[data] = self._loaders_seen
            self._loaders_seen += 1
        return known

    def plan_for(self, group: Group, part: Participation, models: Models) -> None:
        """Divide the data from the job's position on among the members of a new group. Raises
        ConfigurationError if it is not known where a loop of so many steps began."""
        data = self._data
        if data is None:
            return
        self.planner = BatchPlanner(
            data,
            part.position,
            rank=group.rank,
            world_size=group.world_size,
            epochs=self._epochs,
            steps=self.steps_left(part),
            equal=data.equal_passes
            or len(models) > 1  # their collectives would come in different orders
            or any(m.communicates_in_passes() for m in models),
            equal_at_first=any(model.passes.learns_graph for model in models),
        )

    def other_plan(self, planner: BatchPlanner) -> tuple[BatchPlanner, BatchPlan] | None:
        """The step's new plan if the group has changed since `planner` has planned it, else None.
        The group can change when the script calls `session.run` before the block."""
        if self.planner is planner or self.planner is None:
            return None
        plan = self.planner.next_plan()
        assert plan is not None, "no step was committed since"
        return self.planner, plan

    def close(self) -> None:
        """The group is gone, or the loop has ended."""
        if self.planner is not None:
            self.planner.close()
            self.planner = None

    @property
    def order(self) -> str:
        """What decides on the order of the samples, in words."""
        return self._data.order if self._data is not None else ""

    def at_epoch_end(self, position: DataPosition, world_size: int) -> bool:
        """Whether the step that has led to `position` was its epoch's last."""
        return self._data is not None and self._data.ends_epoch(position, world_size)

    def steps_left(self, part: Participation) -> int | None:
        """The steps up to `max_steps` of the present loop, counted from where the job began it: a
        worker that joins gets that place with the results of calls between loops."""
        if self._max_steps is None or part.holds_back:
            return None
        began = self._state.results.get(_begin_of(part.loop)) if part.loop else 0
        if began is None:
            raise ConfigurationError(
                f"session.steps(max_steps={self._max_steps}): the job is in loop {part.loop + 1} "
                "over session.steps(), which it began without max_steps, so it is not known with "
                "which step; use the script that saved the checkpoint, or another checkpoint "
                "directory"
            )
        return max(0, began + self._max_steps - part.progress.committed)


def _begin_of(loop: int) -> str:
    """The name, among the results of calls between loops, of the step with which a loop began."""
    return f"{loop}/began"
