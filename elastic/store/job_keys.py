"""Names the keys of a job in the store."""

from __future__ import annotations

JOBS = "elastic/"
"""The folder of all jobs."""


class JobKeys:
    """The keys of the job called `job`; a folder ends with a slash."""

    def __init__(self, job: str) -> None:
        self.folder = f"{JOBS}{job}/"
        """The folder of all keys of the job."""
        self.leader = f"{self.folder}leader"
        """The election key, whose identity guards every decision."""
        self.generation = f"{self.folder}generation"
        """The newest generation."""
        self.incarnation = f"{self.folder}incarnation"
        """The incarnation of the run, made at its start and kept until the run's end."""
        self.run = f"{self.folder}run"
        """The id of the job's current run."""
        self.stop = f"{self.folder}stop"
        """Why the run should stop; absent until somebody has asked for that."""
        self.records = f"{self.folder}records"
        """Counts that outlive one leader."""
        self.ends = f"{self.folder}ended/"
        """The folder of the runs that have ended."""
        self.incidents = f"{self.folder}incidents/"
        """The folder of the incidents of all runs."""
        self.nodes = f"{self.folder}nodes/"
        """The folder of the nodes that have an agent."""
        self.quarantined = f"{self.folder}quarantine/"
        """The folder of quarantined machines and nodes."""
        self.draining = f"{self.folder}drain/"
        """The folder of drained machines and nodes."""

    def end(self, run_id: str) -> str:
        """The key that says how a run ended, for processes that join it again."""
        return self.ends + run_id

    def incidents_of(self, run_id: str) -> str:
        return f"{self.incidents}{run_id}/"

    def incident(self, run_id: str, number: int) -> str:
        return f"{self.incidents_of(run_id)}{number:09d}"

    def node(self, node: str) -> str:
        return self.nodes + node

    def quarantine(self, node: str) -> str:
        """The key that says why a machine or node is in quarantine."""
        return self.quarantined + node

    def drain(self, node: str) -> str:
        """The key that says why a machine or node is drained."""
        return self.draining + node


def node_of(key: str) -> str:
    """The node of a key in `nodes/`, or the machine or node of one in `quarantine/` or `drain/`."""
    return key.rpartition("/")[2]


def run_of(key: str) -> str:
    return key.rpartition("/")[2]


def job_of(key: str) -> str:
    return key.removeprefix(JOBS).partition("/")[0]
