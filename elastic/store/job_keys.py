"""Where a job's keys are in the store."""

from __future__ import annotations

JOBS = "elastic/"
"""The folder of all jobs."""


class JobKeys:
    """The keys of the job called `job`; a folder ends with a slash."""

    def __init__(self, job: str) -> None:
        self.folder = f"{JOBS}{job}/"
        """Of all that the store knows of the job."""
        self.leader = f"{self.folder}leader"
        """The election key, whose identity guards every decision."""
        self.generation = f"{self.folder}generation"
        """The newest generation."""
        self.incarnation = f"{self.folder}incarnation"
        """Made with the job and kept for as long as the store remembers it."""
        self.run = f"{self.folder}run"
        """The id of the run that the job is at."""
        self.stop = f"{self.folder}stop"
        """Why the run is to be stopped, once somebody wants that."""
        self.records = f"{self.folder}records"
        """What is counted beyond one leader."""
        self.ends = f"{self.folder}ended/"
        """The folder of the runs that have ended."""
        self.incidents = f"{self.folder}incidents/"
        """The folder of the incidents of all runs."""
        self.nodes = f"{self.folder}nodes/"
        """The folder of the nodes that have an agent."""
        self.quarantined = f"{self.folder}quarantine/"
        """The folder of the nodes that may not take part."""
        self.draining = f"{self.folder}drain/"
        """The folder of the nodes that are to be left."""

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


def node_of(key: str) -> str:
    """The node that a key of `nodes/`, `quarantine/` or `drain/` is about."""
    return key.rpartition("/")[2]


def run_of(key: str) -> str:
    """The run that a key of `ended/` is about."""
    return key.rpartition("/")[2]


def job_of(key: str) -> str:
    """The job that a key is about."""
    return key.removeprefix(JOBS).partition("/")[0]
