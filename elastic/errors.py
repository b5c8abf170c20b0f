"""The exceptions that users and operators see, in two families: mend something, or try again later.

ElasticError
├── ConfigurationError      fix the configuration, the script or the data; retrying cannot help
│   ├── CheckpointMismatch  the checkpoint belongs to another model
│   ├── ModelMismatch       the members of the group track different things
│   ├── NodeRefused         this node differs from the others in what must be the same
│   └── StepMisused         the script uses a step so that its gradient would be wrong
├── TransientError          the same call may succeed later
│   └── CheckpointWriteError  the storage refused a write; the checkpoints before it are intact
├── StateLost               nobody holds the job's state any more; ends the job
├── Stranded                this worker cannot go on from the group's state; another replaces it
├── CheckpointDamaged       a stored checkpoint does not match its digests
├── NotInGroup              rank or world size asked for before the group has formed
└── GroupLost               the process group broke; absorbed by `with step` and `session.run`
"""

from __future__ import annotations

import enum
import errno


class ExitCode(enum.IntEnum):
    """How `elastic` ends, after sysexits(3) where it has a fitting number; those from 80 on are
    its own. docs/EVENTS.md says what a controller should do with each."""

    OK = 0
    SCRIPT_FAILED = 1
    USAGE = 2
    TEMPORARY = 75
    CONFIGURATION = 78
    DRAINED = 80
    """A node: an operator has had it left, and keeps it out."""
    QUARANTINED = 81
    """A node: it failed too often, and ends where it would wait (--on-quarantine exit)."""
    STOPPED = 82
    """An operator has ended the job before it was finished."""
    REFUSED = 83
    """A node: the coordinator does not let it take part as it is."""
    NOT_SAVED = 84
    """The job was to be saved and left, and could not be saved."""
    INTERRUPTED = 130
    TERMINATED = 143


_MEANINGS = {
    ExitCode.OK: "finished",
    ExitCode.SCRIPT_FAILED: "failed",
    ExitCode.USAGE: "wrong usage",
    ExitCode.TEMPORARY: "what is needed did not answer or was full",
    ExitCode.CONFIGURATION: "something must be fixed",
    ExitCode.DRAINED: "drained",
    ExitCode.QUARANTINED: "in quarantine",
    ExitCode.STOPPED: "stopped by an operator",
    ExitCode.REFUSED: "refused",
    ExitCode.NOT_SAVED: "not saved",
    ExitCode.INTERRUPTED: "left after Ctrl-C",
    ExitCode.TERMINATED: "left after SIGTERM, or by all nodes",
}


def meaning_of(exit_code: int) -> str:
    """In a few words, for people; docs/EVENTS.md has more."""
    known = exit_code in list(ExitCode)
    return _MEANINGS[ExitCode(exit_code)] if known else f"exit code {exit_code}"


class ElasticError(Exception):
    """Base of every error raised by `elastic`; `exit_code` is what the process ends with."""

    exit_code = ExitCode.SCRIPT_FAILED


class ConfigurationError(ElasticError):
    """Something must be fixed first: names what was wrong, its value and what to do."""

    exit_code = ExitCode.CONFIGURATION


class CheckpointMismatch(ConfigurationError):
    """The checkpoint's tensors are not those of the tracked objects."""


class ModelMismatch(ConfigurationError):
    """This worker tracks other tensors than the rest of its group."""


class StepMisused(ConfigurationError):
    """The script does not use a step as it must for its gradient to be right."""


class NodeRefused(ConfigurationError):
    """The coordinator does not let this node take part beside the others."""

    exit_code = ExitCode.REFUSED


class TransientError(ElasticError):
    """The same call may succeed later."""

    exit_code = ExitCode.TEMPORARY


class CheckpointWriteError(TransientError):
    """The storage refused a write (full, read-only, gone)."""


class CheckpointDamaged(ElasticError):
    """A stored file is missing, truncated or does not match its digest; somebody must mend it."""

    exit_code = ExitCode.CONFIGURATION


class NotInGroup(ElasticError):
    """Rank and world size exist only while the worker is a member of a group."""


class StateLost(ElasticError):
    """Nobody holds the job's state any more, and there is no checkpoint: the job ends."""


class Stranded(ElasticError):
    """This worker cannot go on from the group's state: a fresh one takes its place."""


class GroupLost(ElasticError):
    """The process group cannot be used any more; a new one will form."""


class StateTorn(GroupLost):
    """The same, in the middle of a call that had changed the state and cannot be undone."""


_PASSING = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EMFILE),
    *(errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET),
    *(errno.ENETUNREACH, errno.EHOSTUNREACH),
}


def may_pass(error: BaseException) -> bool:
    """The system, or a storage, may grant later what it refuses now: no reason for a person to
    change anything in the configuration."""
    return isinstance(error, TimeoutError) or (
        isinstance(error, OSError) and error.errno in _PASSING
    )


def refusal_of(message: str, error: BaseException) -> ElasticError:
    """With this message: a TransientError if what is refused may be granted later, else a
    ConfigurationError."""
    return TransientError(message) if may_pass(error) else ConfigurationError(message)
