"""Where a job's keys are in the store."""

from __future__ import annotations

from dataclasses import dataclass

JOBS = "elastic/"
"""The folder of all jobs."""


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys of the job called `job`; a folder ends with a slash."""

    job: str

    @property
    def leader(self) -> str:
        """The election key, whose identity guards every decision."""
        return self._below("leader")

    @property
    def generation(self) -> str:
        """The newest generation."""
        return self._below("generation")

    @property
    def incarnation(self) -> str:
        """Made with the job and kept for as long as the store remembers it."""
        return self._below("incarnation")

    @property
    def run(self) -> str:
        """The id of the run that the job is at."""
        return self._below("run")

    @property
    def stop(self) -> str:
        """Why the run is to be stopped, once somebody wants that."""
        return self._below("stop")

    @property
    def records(self) -> str:
        """What is counted beyond one leader."""
        return self._below("records")

    @property
    def folder(self) -> str:
        """Of all that the store knows of the job."""
        return self._below("")

    @property
    def ends(self) -> str:
        """The folder of the runs that have ended."""
        return self._below("ended/")

    @property
    def incidents(self) -> str:
        """The folder of the incidents of all runs."""
        return self._below("incidents/")

    @property
    def nodes(self) -> str:
        """The folder of the nodes that have an agent."""
        return self._below("nodes/")

    @property
    def quarantined(self) -> str:
        """The folder of the nodes that may not take part."""
        return self._below("quarantine/")

    @property
    def draining(self) -> str:
        """The folder of the nodes that are to be left."""
        return self._below("drain/")

    def end(self, run_id: str) -> str:
        """How a run ended, for processes that come to it again."""
        return self.ends + run_id

    def incidents_of(self, run_id: str) -> str:
        """The folder of a run's incidents."""
        return f"{self.incidents}{run_id}/"

    def incident(self, run_id: str, number: int) -> str:
        """What is known of one."""
        return f"{self.incidents_of(run_id)}{number:09d}"

    def node(self, node: str) -> str:
        """A node's registration."""
        return self.nodes + node

    def quarantine(self, node: str) -> str:
        """Why a node may not take part."""
        return self.quarantined + node

    def drain(self, node: str) -> str:
        """Who wants a node to be left."""
        return self.draining + node

    def _below(self, name: str) -> str:
        return f"{JOBS}{self.job}/{name}"


def node_of(key: str) -> str:
    """The node that a key of `nodes/`, `quarantine/` or `drain/` is about."""
    return key.rpartition("/")[2]


def run_of(key: str) -> str:
    """The run that a key of `ended/` is about."""
    return key.rpartition("/")[2]


def job_of(key: str) -> str:
    """The job that a key is about."""
    return key.removeprefix(JOBS).partition("/")[0]
