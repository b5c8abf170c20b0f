"""Where a job's keys are in the store."""

from __future__ import annotations

from dataclasses import dataclass


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
    def ended(self) -> str:
        """How the job ended, for whoever was not connected then."""
        return self._below("ended")

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
        return f"elastic/{self.job}/{name}"


def node_of(key: str) -> str:
    """The node that a key of `nodes/`, `quarantine/` or `drain/` is about."""
    return key.rpartition("/")[2]
