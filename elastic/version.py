"""The version of this package, and what it is called and needs."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"
"""Agents and coordinators of a job must have the same release."""
DISTRIBUTION = "elastic-ddp"
"""What pip calls it, since another project's package is called elastic there."""


def release_of(version: str) -> str:
    """Return MAJOR.MINOR. Messages within it are compatible: nodes can be upgraded one by one."""
    return ".".join(version.split(".")[:2])


def unfit_system(platform: str) -> str | None:
    """Return why elastic cannot run on this system (`sys.platform`); None: it can."""
    if platform == "linux":
        return None
    return (
        f"elastic needs Linux, and this is {platform}: it follows processes by pidfd, /proc and "
        "Unix sockets; run it in a container, a virtual machine or WSL 2"
    )


def other_package(folder: Path) -> str | None:
    """Return what is wrong if the folder in which elastic is installed has the other project's
    package, too, whose files have the same names."""
    found = next(folder.glob("elastic-[0-9]*.dist-info"), None)
    if found is None:
        return None
    return (
        f"{folder} has the package 'elastic' of another project ({found.name}), whose files mix "
        f"with those of {DISTRIBUTION}: pip uninstall elastic {DISTRIBUTION}, then pip install "
        f"{DISTRIBUTION}"
    )
