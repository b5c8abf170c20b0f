"""Registers an agent in a job of many nodes: holds the node's name under a lease, keeps the token
and the count of starts by which the next agent in the same directory goes on, and watches for
preemption.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

from elastic.agent.coordinator_link import Leader
from elastic.core.documents import Unreadable, to_json
from elastic.errors import ConfigurationError, refusal_of
from elastic.rpc.identity import start_token_of
from elastic.runtime.off_loop import off_loop
from elastic.settings.masking import masked_arguments
from elastic.store.claim import Claim
from elastic.store.follow import follow_key
from elastic.store.interface import Entry, Store
from elastic.store.job_documents import NodeDocument, node_from_json
from elastic.store.job_keys import JobKeys
from elastic.store.leader_watch import LeaderWatch
from elastic.store.lease_keeper import LeaseState, boot_time_s
from elastic.store.retries import retry, within
from elastic.timeouts import timeout

_PATIENCE_S = 1.0
"""How much longer than its TTL a lease may live, since stores count whole seconds."""


class Registration:
    """Holds the node's name, one agent at a time. Call `register`, then `keep` until closed, and
    `close` when no process of this node is left.

    `on_change`: called with HELD after each registration and when a lease in doubt was not lost,
    SUSPECT when the lease was not renewed in time, GONE when it is lost; `keep` then registers
    again. `on_waiting`: called when another agent has the name, with a description of that agent
    and the most seconds that its lease may last.
    """

    def __init__(
        self,
        store: Store,
        *,
        job: str,
        node: str,
        document: NodeDocument,
        on_change: Callable[[LeaseState], None],
        on_waiting: Callable[[str, float], None] = lambda _who, _at_most_s: None,
        ttl_s: float,
        clock: Callable[[], float] = boot_time_s,
    ) -> None:
        """A restarted agent takes over its own key: it has the same `document.start_token`."""
        self._store = store
        self._job = job
        self._node = node
        self._document = document
        self._on_change = on_change
        self._on_waiting = on_waiting
        self._ttl_s = ttl_s
        self._key = JobKeys(job).node(node)
        self._claim = Claim(store, key=self._key, ttl_s=ttl_s, on_change=on_change, clock=clock)
        self._closed = False

    @property
    def renewed_at_s(self) -> float:
        """When the last answered renewal was sent, by `clock`; 0 while the name is not taken.

        Others see the key disappear no earlier than `ttl_s` after it.
        """
        return self._claim.renewed_at_s if self._claim.entry is not None else 0.0

    def held(self) -> bool:
        """Whether this node is certainly registered at this moment."""
        return self._claim.held()

    async def register(self) -> None:
        """Take the name; wait through outages of the store.

        Raises ConfigurationError if another agent keeps it for longer than a lost lease could live.
        """
        await self._register(take_over=True)

    async def keep(self) -> None:
        """Stay registered until `close`. Raises ConfigurationError as `register` does."""
        while not self._closed:
            await self._claim.hold()
            if not self._closed:
                # Our key is gone with its lease: a key with our token belongs to a second agent
                # that was started on the same files.
                await self._register(take_over=False)

    async def close(self) -> None:
        """Tell the store that no process of this node is left, and delete the key.

        Takes a few seconds at most. If the store does not answer, the lease ends by itself.
        """
        self._closed = True
        farewell = dataclasses.replace(self._document, left=True)
        await self._claim.release(last_words=to_json(farewell))

    async def _register(self, *, take_over: bool) -> None:
        while not self._closed:
            over = await self._until_free(take_over)
            if await self._claim.take(to_json(self._document), over=over) is not None:
                self._on_change(LeaseState.HELD)
                if not self._claim.held():
                    self._on_change(LeaseState.SUSPECT)
                return

    async def _until_free(self, take_over: bool) -> Entry | None:
        """Wait until the name is free. Return the entry to take over, or None if there is none."""
        other: Entry | None
        loop = asyncio.get_running_loop()
        async with aclosing(follow_key(self._store, self._key)) as entries:
            other = await anext(entries)
            ends_at = loop.time() + self._ttl_s + _PATIENCE_S
            if other is not None and not (take_over and self._is_ours(other)):
                self._on_waiting(_owner(other), self._ttl_s + _PATIENCE_S)
            while other is not None and not (take_over and self._is_ours(other)):
                try:
                    other = await within(anext(entries), ends_at - loop.time())
                except asyncio.TimeoutError:
                    break
            else:
                return other
        # An outage may have hidden that the entry went away.
        other = await retry(lambda: self._store.get(self._key), f"get {self._key!r}")
        if other is not None:
            raise self._taken_by(other)
        return None

    def _is_ours(self, entry: Entry) -> bool:
        document = _document(entry)
        return document is not None and document.start_token == self._document.start_token

    def _taken_by(self, entry: Entry) -> ConfigurationError:
        return ConfigurationError(
            f"the node name {self._node!r} of the job {self._job!r} is taken by {_owner(entry)}; "
            "stop that one, or give this one another name with --node-name"
        )


def _document(entry: Entry) -> NodeDocument | None:
    try:
        return node_from_json(entry.value)
    except Unreadable:
        return None


def _owner(entry: Entry) -> str:
    other = _document(entry)
    if other is None:
        return "a registration that this version cannot read"
    return f"an agent on host {other.host!r}, started {_instant(other.started_unix_s)}"


def _instant(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


class LeaderOnceRegistered:
    """A LeaderSource that tells the leader only after this node has registered its name."""

    def __init__(self, watch: LeaderWatch) -> None:
        self._watch = watch
        self.registered = asyncio.Event()

    async def newer(self, than: Any = None) -> Leader:
        await self.registered.wait()
        return await self._watch.newer(than)


_FILE = "start-token"
_STARTS_FILE = "starts"
_BYTES = 32
_BYTES_EARLIER = 16


class StartToken(NamedTuple):
    """What tells the starts of one agent's directory from those of others with its name."""

    token: str
    """Anyone may read it in the store."""
    secret: str
    """What proves that it is one's own; empty in a directory that an earlier version made."""


def start_token(directory: Path) -> StartToken:
    """The token of `directory`. The first start makes its secret, which only this user can read.

    Raises ConfigurationError if it can be neither read nor written, TransientError if there is no
    space for it.
    """
    path = directory / _FILE
    try:
        with contextlib.suppress(FileNotFoundError, ValueError):
            found = path.read_text(encoding="ascii").strip()
            if (length := len(bytes.fromhex(found))) == _BYTES:
                return StartToken(start_token_of(found), found)
            if length == _BYTES_EARLIER:
                return StartToken(found, "")
        made = _make(path)
        return StartToken(start_token_of(made), made)
    except OSError as error:
        raise refusal_of(
            f"cannot write the agent's token to {path}: {error.strerror}; "
            "free space there, or give the agent a directory that it can write to",
            error,
        ) from error


def next_start(directory: Path) -> int:
    """Count this start, and return how many agents have been started in `directory`.

    If the count cannot be read, it returns a much larger number: workers of an earlier agent may
    live, and names must not repeat. Raises ConfigurationError if the count cannot be written,
    TransientError if there is no space for it.
    """
    path = directory / _STARTS_FILE
    try:
        before = int(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        before = 0
    except (OSError, ValueError):
        before = int(time.time())
    written = path.with_name(f"{_STARTS_FILE}.{os.getpid()}")
    try:
        try:
            written.write_text(str(before + 1), encoding="ascii")
            written.replace(path)  # atomic: a kill in between must not reset it, or names repeat
        finally:
            with contextlib.suppress(OSError):
                written.unlink()
    except OSError as error:
        raise refusal_of(
            f"cannot write the count of starts to {path}: {error.strerror}; "
            "free space there, or give the agent a directory that it can write to",
            error,
        ) from error
    return before + 1


def _make(path: Path) -> str:
    token = secrets.token_hex(_BYTES)
    written = path.with_name(f"{_FILE}.{os.getpid()}")
    written.unlink(missing_ok=True)
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token)
    written.replace(path)
    return token


_COMMAND_TIMEOUT_S = 30.0


_CANNOT_RUN = {126: "cannot run its program", 127: "does not find its program"}  # as shells say it


async def until_preempted(
    *,
    file: Path | None,
    command: Sequence[str] | None,
    interval_s: float,
    on_problem: Callable[[str], None],
) -> str:
    """Return the reason once `file` exists or `command` ends with exit code 0; else never.

    on_problem: called when the command cannot tell, once for each reason until it can.
    """
    told = ""
    while True:
        if file is not None and await _is_there(file):
            return f"preemption: {file} exists"
        if command is not None:
            try:
                if await _succeeds(command):
                    shown = " ".join(masked_arguments(command[0], command[1:]))
                    return f"preemption: {shown} exited with 0"  # told to the whole job
                told = ""
            except _CannotTell as problem:
                if str(problem) != told:
                    told = str(problem)
                    on_problem(told)
        await asyncio.sleep(interval_s)


class _CannotTell(Exception):
    """The command did not say whether the machine is about to be taken away."""


async def _is_there(file: Path) -> bool:
    """A path that cannot be examined counts as absent."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no thread is left for it
        return await off_loop(file.exists)
    return False


async def _succeeds(command: Sequence[str]) -> bool:
    """Run the command. Raises _CannotTell if it cannot be run, or takes too long."""
    shown = f"the preemption command {' '.join(command)!r}"
    advice = "preemptions go unnoticed until it works (--preemption-command)"
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise _CannotTell(f"{shown} cannot be run: {why}; {advice}") from error
    try:
        async with timeout(_COMMAND_TIMEOUT_S):
            code = await process.wait()
    except asyncio.TimeoutError:
        raise _CannotTell(
            f"{shown} did not end within {_COMMAND_TIMEOUT_S:g} s and was killed; {advice}"
        ) from None
    finally:
        if process.returncode is None:  # kill it, and what it waits for
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code in _CANNOT_RUN:
        raise _CannotTell(f"{shown} {_CANNOT_RUN[code]} (exit code {code}); {advice}")
    return code == 0
