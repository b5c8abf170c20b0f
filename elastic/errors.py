"""The errors and exit codes that users and operators see: fix something, or try again later.

ElasticError
├── ConfigurationError      fix the configuration, the script or the data; a retry cannot help
│   ├── CheckpointMismatch  the checkpoint belongs to another model
│   ├── ModelMismatch       the members of the group track different tensors
│   ├── NodeRefused         this node differs from the others in something that must be the same
│   └── StepMisused         the script uses a step in a way that makes its gradient wrong
├── TransientError          the same call may succeed later
│   └── CheckpointWriteError  the storage refused a write; earlier checkpoints are intact
├── StateLost               no worker holds the job's state any more; ends the job
├── Stranded                this worker cannot go on from the group's state; another one replaces it
├── CheckpointDamaged       a stored checkpoint does not match its digests
├── NotInGroup              the script asked for rank or world size before the group formed
└── GroupLost               the process group broke; `with step` and `session.run` absorb it
    └── StateTorn           the same, and the state has changed in a way that cannot be undone
"""

from __future__ import annotations

import enum
import errno


class ExitCode(enum.IntEnum):
    """Exit codes of `elastic`: those of sysexits(3) where one fits; those from 80 on are its own.
    docs/EVENTS.md says what a controller should do with each."""

    OK = 0
    SCRIPT_FAILED = 1
    USAGE = 2
    TEMPORARY = 75
    CONFIGURATION = 78
    DRAINED = 80
    """A node: an operator drained it, and keeps it out."""
    QUARANTINED = 81
    """A node: it failed too often, and exits instead of waiting (--on-quarantine exit)."""
    STOPPED = 82
    """An operator stopped the job before it was finished."""
    REFUSED = 83
    """A node: the coordinator does not let it join as it is."""
    NOT_SAVED = 84
    """Steps of the job are not saved: its last save failed, or its state was lost without one."""
    INTERRUPTED = 130
    TERMINATED = 143


_MEANINGS = {
    ExitCode.OK: "finished",
    ExitCode.SCRIPT_FAILED: "failed",
    ExitCode.USAGE: "wrong usage",
    ExitCode.TEMPORARY: "a service did not answer, or a resource is full",
    ExitCode.CONFIGURATION: "something must be fixed",
    ExitCode.DRAINED: "drained",
    ExitCode.QUARANTINED: "in quarantine",
    ExitCode.STOPPED: "stopped by an operator",
    ExitCode.REFUSED: "refused",
    ExitCode.NOT_SAVED: "could not be saved",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C",
    ExitCode.TERMINATED: "stopped by SIGTERM, or all nodes left",
}


def meaning_of(exit_code: int) -> str:
    """Return the exit code's meaning in a few words, for people; docs/EVENTS.md says more."""
    known = exit_code in list(ExitCode)
    return _MEANINGS[ExitCode(exit_code)] if known else f"exit code {exit_code}"


class ElasticError(Exception):
    """Base of every error that `elastic` raises. The process ends with `exit_code`."""

    exit_code = ExitCode.SCRIPT_FAILED


class ConfigurationError(ElasticError):
    """Something must be fixed first. The message says what is wrong, its value and what to do."""

    exit_code = ExitCode.CONFIGURATION


class CheckpointMismatch(ConfigurationError):
    """The checkpoint's tensors are not those of the tracked objects."""


class ModelMismatch(ConfigurationError):
    """This worker tracks other tensors than the rest of its group."""


class StepMisused(ConfigurationError):
    """The script uses a step in a way that makes its gradient wrong."""


class NodeRefused(ConfigurationError):
    """The coordinator does not let this node join, because it does not fit the others."""

    exit_code = ExitCode.REFUSED


class TransientError(ElasticError):
    """The same call may succeed later."""

    exit_code = ExitCode.TEMPORARY


class CheckpointWriteError(TransientError):
    """The storage refused a write (full, read-only, gone)."""


class CheckpointDamaged(ElasticError):
    """A stored file is missing, truncated or does not match its digest. A person must repair it."""

    exit_code = ExitCode.CONFIGURATION


class NotInGroup(ElasticError):
    """Rank and world size exist only while the worker is a member of a group."""


class StateLost(ElasticError):
    """No worker holds the job's state any more, and there is no checkpoint: the job ends."""

    exit_code = ExitCode.NOT_SAVED


class Stranded(ElasticError):
    """This worker cannot go on from the group's state. A fresh worker replaces it."""


class GroupLost(ElasticError):
    """The process group cannot be used any more; a new one will form."""


class StateTorn(GroupLost):
    """The group was lost, and a call, or code below a block that does not count, had changed the
    state in a way that cannot be undone."""


_PASSING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EMFILE),
    *(errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET),
    *(errno.ENETUNREACH, errno.EHOSTUNREACH),
}


def may_pass(error: BaseException) -> bool:
    """True if a retry may succeed without any change to the configuration."""
    return isinstance(error, TimeoutError) or (
        isinstance(error, OSError) and error.errno in _PASSING
    )


def refusal_of(message: str, error: BaseException) -> ElasticError:
    """Return an error with this message: TransientError if `may_pass`, else ConfigurationError."""
    return TransientError(message) if may_pass(error) else ConfigurationError(message)
