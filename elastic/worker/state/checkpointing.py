"""When a member saves, and what it restores: the session's side of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastic.checkpoint import catalog
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.errors import GroupLost
from elastic.v1 import local_pb2 as pb
from elastic.worker.group.process_group import Group
from elastic.worker.state.job_state import JobState
from elastic.worker.state.loading import Loaded, load_latest
from elastic.worker.state.saving import Place, Saver

Notify = Callable[[str, Mapping[str, str]], None]


class Checkpointing:
    """Saves at step boundaries where every member does, and restores where nobody has the state.

    Without a directory it does nothing.
    """

    def __init__(self, saver: Saver | None, directory: CheckpointDirectory | None, notify: Notify):
        self._saver = saver
        self._directory = directory
        self._notify = notify

    @classmethod
    def nowhere(cls) -> Checkpointing:
        """For a job without a checkpoint directory."""
        return cls(None, None, lambda _name, _fields: None)

    @classmethod
    def at(cls, url: str, *, worker: str, every: int, send: Callable[..., None]) -> Checkpointing:
        """Save to and restore from `url`; `send` reports to the agent."""
        directory = open_directory(url)

        def notify(name: str, fields: Mapping[str, str]) -> None:
            send(notice=pb.Notice(name=name, fields=dict(fields)))

        return cls(Saver(directory, worker=worker, every=every, send=send), directory, notify)

    @property
    def every(self) -> int:
        """Steps between two checkpoints; 0: none are saved at intervals."""
        return self._saver.every if self._saver is not None else 0

    # ---- restoring

    def load(self) -> tuple[Loaded | None, str]:
        """The newest intact checkpoint, None if there is none; and where the state comes from."""
        if self._directory is None:
            return None, "initial"
        damaged: list[int] = []

        def on_damaged(step: int, reason: str) -> None:
            damaged.append(step)
            self._notify("checkpoint_damaged", {"step": str(step), "reason": reason})

        loaded = load_latest(self._directory, on_damaged)
        if loaded is None:
            return None, "initial"
        for step in damaged:  # their steps will be saved again
            catalog.prepare(self._directory, step)
        return loaded, f"checkpoint of step {loaded.manifest.step}"

    # ---- saving

    def save(self, state: JobState, group: Group) -> None:
        """Begin to save at a step boundary, unless this group already does so."""
        if self._saver is not None and state.committed > 0:
            self._saver.save(state, _place(group))

    def save_and_wait(
        self,
        state: JobState,
        group: Group,
        superseded: Callable[[], bool],
        *,
        insists: bool = False,
    ) -> None:
        """Save unless this very step is saved, and wait until it is committed or given up.

        insists: try again what the storage refuses, until the coordinator ends the job.
        Raises GroupLost once `superseded`: another group must save then.
        """
        saver, step = self._saver, state.committed
        if saver is None or step == 0 or saver.is_committed(step):
            return
        saver.save(state, _place(group), insists=insists)
        while not saver.is_settled(step, timeout_s=0.05):
            if superseded() or group.aborted:
                raise GroupLost("superseded while saving")
            saver.try_again()

    def settle(self, step: int, *, committed: bool, generation: int = 0) -> None:
        """The coordinator has committed the checkpoint of `step`, or abandoned that of the group of
        `generation`."""
        if self._saver is not None:
            self._saver.settle(step, committed=committed, generation=generation)

    def report_again(self) -> None:
        """Tell a coordinator that may be new what it has not settled."""
        if self._saver is not None:
            self._saver.report_again()

    def wait_idle(self) -> None:
        """Wait until nothing is being written."""
        if self._saver is not None:
            self._saver.wait_idle()


def _place(group: Group) -> Place:
    return Place(
        run=group.generation.incarnation,
        generation=group.generation.number,
        rank=group.rank,
        world_size=group.world_size,
    )
