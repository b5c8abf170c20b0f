"""Makes a worker's children die with it and close the sockets of its groups."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable

from elastic.runtime.orphans import set_parent_death_signal


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when `parent` (its pid) ends, or now if it has ended."""
    set_parent_death_signal(parent, signal.SIGKILL)


def keep_from_children(descriptors: Callable[[], Iterable[int]]) -> None:
    """Make this process's children (data loaders) close these descriptors and die with it.

    A copy of a group's socket in a child would hide this process's death from its peers. The kernel
    ties the death signal to the thread that forks, so only the main thread's children get it. The
    zygote ends the others together with their process group.
    """
    owner = os.getpid()
    forking = threading.local()

    def before() -> None:
        forking.on_main_thread = threading.current_thread() is threading.main_thread()

    def in_child() -> None:
        if os.getppid() != owner:
            return  # a grandchild: its own parent's death ends it
        if forking.on_main_thread:
            die_with_parent(owner)
        for descriptor in descriptors():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    os.register_at_fork(before=before, after_in_child=in_child)
