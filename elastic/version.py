"""The version of this package; agents and coordinators of a job must be of one release."""

__version__ = "0.1.0"


def release_of(version: str) -> str:
    """MAJOR.MINOR: within it messages stay compatible, so that nodes can be upgraded one by one."""
    return ".".join(version.split(".")[:2])
