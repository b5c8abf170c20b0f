"""The version of this package. Agents and coordinators of a job must have the same release."""

__version__ = "0.1.0"


def release_of(version: str) -> str:
    """Return MAJOR.MINOR. Messages within it are compatible: nodes can be upgraded one by one."""
    return ".".join(version.split(".")[:2])
