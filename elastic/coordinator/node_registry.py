"""Knows which nodes the store has, and decides which of them leave or are kept out.

The registry knows which nodes have an agent, and which certainly have no worker left. A node leaves
because its agent asks, an operator drains it or it fails too often. A machine that is drained or
quarantined is kept out until it is cleared.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.coordinator.connected_agents import ConnectedAgents, ConnectedNode, name_of, node_id
from elastic.core.coordinator import events as ev
from elastic.core.documents import Unreadable
from elastic.core.legible import is_representable_time, is_utf8_encodable
from elastic.core.membership import Failure, NodeId, WorkerStatus
from elastic.core.quarantine import NodeFailures
from elastic.errors import ConfigurationError, ExitCode
from elastic.rpc.codec import Codec
from elastic.runtime.journal import Journal
from elastic.settings.limits import require_node_name
from elastic.store.follow import follow
from elastic.store.interface import Entry, Guard, GuardFailed, Listing, Store
from elastic.store.job_documents import NodeDocument, node_from_json
from elastic.store.job_keys import JobKeys, node_of
from elastic.store.retries import retry
from elastic.v1 import control_pb2 as pb

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFigures:
    """What there is to know of one node, for metrics, the page and operators."""

    node: str
    state: str
    failures: int = 0
    longest_pause_s: float = 0.0
    connected: bool = True
    host: str = ""
    slots: int = 0
    reason: str = ""
    """Why the node leaves or is kept out."""
    since_unix_s: float = 0.0
    """Since when it is kept out, or connected."""
    machine: str = ""
    version: str = ""
    workers: tuple[WorkerStatus, ...] = ()


_STATUS = Codec(NodeFigures, pb.NodeStatus, without=("connected",))
GONE_MARGIN_S = 3.0
"""Time beyond the isolation time after which a node is taken for gone. Its workers begin no step in
it, and its keeper ends them halfway (elastic/runtime/training_lease.py), even on a busy machine."""

_Instance = tuple[str, str | None]
"""A node and its agent's start token; None: any agent that it had before this leader's election."""


class NodeHandler(Protocol):
    """Handles changes of nodes in the store; called on the coordinator's event loop."""

    def node_registered(self, node: str, document: NodeDocument) -> None:
        """An agent has registered the name; called again when its document changes."""
        ...

    def node_vanished(self, node: str) -> None:
        """The registration is lost; the workers may still train."""
        ...

    def node_gone(self, node: str, start_token: str | None) -> None:
        """Nothing runs any more that the agent with this start token has started.

        None: the same for every agent that this node had before this leader was elected, except one
        that is registered or connected now.
        """
        ...


class NodeRegistry:
    """Follows the registrations of nodes. Start `run` once, and report connections.

    A node's workers train until `isolation_timeout_s` after the sending of the last request that
    the store or a coordinator answered. So they are certainly gone that long, plus a margin, after
    both its key and its connection have gone, unless it registers again.
    """

    def __init__(
        self,
        store: Store,
        handler: NodeHandler,
        *,
        job: str,
        isolation_timeout_s: float,
        expected: Iterable[NodeId] = (),
        as_of: int = 0,
        margin_s: float = GONE_MARGIN_S,
    ) -> None:
        """`expected`: the nodes of the newest generation, which was written at revision `as_of`,
        and of earlier ones that may train.

        When `run` lists the nodes first, an expected node counts as vanished if its registration is
        missing, newer than `as_of` or another agent's.
        """
        self._store = store
        self._handler = handler
        self._folder = JobKeys(job).nodes
        self._gone_after_s = isolation_timeout_s + margin_s
        self._expected = frozenset(expected)
        self._as_of = as_of
        self._registered: dict[str, NodeDocument] = {}
        self._vanished: dict[_Instance, asyncio.TimerHandle | asyncio.Task[None] | None] = {}
        self._connected: set[_Instance] = set()

    async def run(self) -> None:
        """Follow until cancelled. Raises ConfigurationError if the store does."""
        try:
            async with aclosing(follow(self._store, self._folder)) as news:
                async for item in news:
                    if isinstance(item, Listing):
                        self._listed({node_of(e.key): e for e in item.entries})
                    else:
                        self._now(node_of(item.key), item.entry)
        finally:
            for timer in self._vanished.values():
                if timer is not None:
                    timer.cancel()

    def holder(self, node: str) -> str | None:
        """Return the start token of the agent that is registered under this name, or None."""
        document = self._registered.get(node)
        return document.start_token if document is not None and not document.left else None

    @property
    def has_nodes(self) -> bool:
        return any(not document.left for document in self._registered.values())

    def connected(self, node: str, start_token: str) -> None:
        """The agent has a stream to this coordinator, so it is not cut off."""
        self._connected.add((node, start_token))

    def disconnected(self, node: str, start_token: str) -> None:
        instance = (node, start_token)
        self._connected.discard(instance)
        if instance in self._vanished:
            self._count_down(instance)

    def _listed(self, entries: Mapping[str, Entry]) -> None:
        expected, self._expected = self._expected, frozenset()
        for node in sorted({name_of(node) for node in expected}):
            entry = entries.get(node)
            if entry is None or entry.created > self._as_of or not _is_of(expected, node, entry):
                self._vanish(node, None)
        for node in sorted({*self._registered, *entries}):
            self._now(node, entries.get(node))

    def _now(self, node: str, entry: Entry | None) -> None:
        """Take a node's present registration; None: it has none."""
        before = self._registered.pop(node, None)
        document = _document(entry)
        if before is not None and not before.left and not _same_agent(before, document):
            self._vanish(node, before.start_token)
        if document is None:
            return
        self._registered[node] = document
        if document == before:
            return
        self._cancel((node, document.start_token))
        if document.left:
            self._handler.node_gone(node, document.start_token)
        else:
            self._handler.node_registered(node, document)

    def _vanish(self, node: str, start_token: str | None) -> None:
        self._handler.node_vanished(node)
        self._count_down((node, start_token))

    def _count_down(self, instance: _Instance) -> None:
        self._cancel(instance)
        loop = asyncio.get_running_loop()
        self._vanished[instance] = loop.call_later(self._gone_after_s, self._time_is_up, instance)

    def _cancel(self, instance: _Instance) -> None:
        timer = self._vanished.pop(instance, None)
        if timer is not None:
            timer.cancel()

    def _time_is_up(self, instance: _Instance) -> None:
        if instance in self._connected:
            self._vanished[instance] = None  # the countdown starts when the stream ends
            return
        name = f"is {instance[0]} gone"
        self._vanished[instance] = asyncio.create_task(self._declare_gone(instance), name=name)

    async def _declare_gone(self, instance: _Instance) -> None:
        """Declare the node gone, unless it has registered again: this process may be the one that
        was cut off from the store. Wait until the store answers."""
        name, token = instance
        document = _document(await retry(lambda: self._store.get(self._folder + name), "look"))
        if document is not None and document.start_token == token and not document.left:
            return  # the news of that is on its way
        del self._vanished[instance]
        self._handler.node_gone(name, token)


def _is_of(nodes: Collection[NodeId], name: str, entry: Entry) -> bool:
    """Return True if the registration is one of these nodes', or cannot be read."""
    document = _document(entry)
    return document is None or node_id(name, document.start_token) in nodes


def _same_agent(before: NodeDocument, now: NodeDocument | None) -> bool:
    return now is not None and now.start_token == before.start_token


def _document(entry: Entry | None) -> NodeDocument | None:
    if entry is None:
        return None
    try:
        return node_from_json(entry.value)
    except Unreadable as error:
        _LOG.warning("the registration %s cannot be read: %s", entry.key, error)
        return None


WANTED = ("ready", "unreachable")
"""The states of nodes whose workers should train."""


class DepartingNodes:
    """Decides which nodes leave, tells the state machine (`post`) and their agents, and stores
    which machines are kept out.

    Exclusions and failures apply to the machine that a node runs on: another machine may take the
    node's name, and this one may come back under another name. If an agent does not report its
    machine, the node's name takes its place.

    start: runs a coroutine in the background.
    """

    def __init__(
        self,
        nodes: ConnectedAgents,
        exclusions: Exclusions,
        failures: NodeFailures,
        journal: Journal,
        *,
        post: Callable[[ev.Event], None],
        start: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._nodes = nodes
        self._exclusions = exclusions
        self._failures = failures
        self._journal = journal
        self._post = post
        self._start = start
        self._leaving: dict[NodeId, str] = {}  # reasons
        self._asked: set[NodeId] = set()  # nodes that want to leave by themselves
        self._cut_off: dict[NodeId, str] = {}  # which peers do not reach these nodes, or they not
        self._machines: dict[NodeId, str] = {}  # nodes on which something may run

    async def load(self) -> None:
        """Load the exclusions that earlier leaders stored; waits out outages."""
        await retry(self._exclusions.load, "load the excluded nodes")

    # ---- what happens to a node

    def arrived(self, node: ConnectedNode) -> None:
        self.registered(node.node, node.stream.hello.machine)
        excluded = self._excluded(node)
        if excluded is not None:
            self._leave(node, excluded.reason)
            if excluded.state == DRAINED:
                node.stream.send(drain=pb.Drain())

    def registered(self, node: NodeId, machine: str) -> None:
        """Note a node's machine; empty: its agent's version does not report one."""
        if machine:
            self._machines[node] = machine

    def left_out(self, reasons: Mapping[NodeId, str]) -> None:
        """These nodes take no part because they and others do not reach each other."""
        self._cut_off.update(reasons)

    def takes_part(self, nodes: Iterable[NodeId]) -> None:
        """These nodes' workers are members of a group."""
        for node in nodes:
            self._cut_off.pop(node, None)

    def leave_requested(self, node: ConnectedNode, reason: str) -> None:
        if node.node not in self._leaving:
            self._journal.record("node_leaving", node=node.stream.node, reason=reason)
        self._asked.add(node.node)
        self._leave(node, reason)

    def worker_failed(self, node: ConnectedNode, failure: Failure, *, step: int) -> None:
        """step: the steps that the job has committed."""
        key, now = self._key(node.node), time.monotonic()
        if self._failures.worker_failed(key, failure, now, step=step):
            self._quarantine(node.node)

    def members_lost(self, nodes: Iterable[NodeId]) -> None:
        """The group goes on without members on these nodes.

        A node whose agent is connected has reported its own failures. Several nodes that are lost
        at once have a common cause, so none of them is blamed.
        """
        lost = [node for node in nodes if self._nodes.find(node) is None]
        if len(lost) != 1 or lost[0] in self._leaving:
            return
        if self._failures.node_lost(self._key(lost[0]), time.monotonic()):
            self._quarantine(lost[0])

    def left_group(self, node: ConnectedNode) -> None:
        """No worker of the node is in the group: it may go, or waits until it is cleared."""
        name = node.stream.node
        self._journal.record("node_left_group", node=name)
        excluded = self._excluded(node)
        if excluded is None:
            node.stream.send(drained=pb.Drained(reason=self._leaving.get(node.node, "")))
            return
        is_drained = excluded.state == DRAINED
        if is_drained or node.stream.hello.ends_in_quarantine or node.node in self._asked:
            back = f"`elastic nodes --clear {excluded.machine or name}` lets it come back"
            exit_code = ExitCode.DRAINED if is_drained else ExitCode.QUARANTINED
            node.stream.send(
                drained=pb.Drained(reason=f"{excluded.reason}; {back}", exit_code=exit_code)
            )

    def leaves(self, node: NodeId) -> bool:
        """The node should no longer take part: it has asked, or is drained or in quarantine."""
        return node in self._leaving

    def gone(self, node: NodeId) -> None:
        self._leaving.pop(node, None)
        self._asked.discard(node)
        self._cut_off.pop(node, None)
        self._machines.pop(node, None)

    # ---- what operators want

    async def drain(self, name: str, reason: str) -> str:
        """Drain the machine of a node, or the one of this name; return a message for the operator.

        Raises TransientError if the store does not accept it (nothing has changed here then), and
        ConfigurationError if no node can have the name or if other nodes would leave, too.
        """
        require_node_name(name)
        key, is_machine = self._resolve_name(name)
        nodes = self._nodes_of(key)
        out = self._exclusions.get(key)
        if not nodes and out is not None and out.state == DRAINED:
            return f"{name} is drained already; `elastic nodes --clear {key}` lets it come back"
        reason = reason or "drained by an operator"
        node = name if name != key else nodes[0].stream.node if nodes else ""
        await self._exclusions.add(key, DRAINED, reason, node=node, is_machine=is_machine)
        self._tell_of(key)
        nodes = self._nodes_of(key)  # others may have come during the write
        for one in nodes:
            one.stream.send(drain=pb.Drain())
        if not nodes:
            what = f"machine {key}" if is_machine else f"node {name}"
            return f"no {what} is connected now; it will be kept out when it connects"
        names = " and ".join(sorted(one.stream.node for one in nodes))
        where = f" (machine {key})" if is_machine else ""
        return f"the workers of {names}{where} leave at the next step boundary"

    async def clear(self, name: str) -> str:
        """Let a machine, or that of a node, take part again; return a message for the operator.

        Raises TransientError, and ConfigurationError if several machines may be meant or nothing
        can have the name.
        """
        keys = self._exclusions.named(name)
        if not keys:
            require_node_name(name)
            keys = [self._resolve_name(name)[0]]
        if len(keys) > 1:
            raise ConfigurationError(
                f"several machines that had the node {name} are kept out ({', '.join(keys)}); "
                "clear one of them by its name"
            )
        (key,) = keys
        nodes = self._nodes_of(key)
        cleared = await self._exclusions.clear(key)
        self._failures.forgive(key)
        if cleared is None:
            waited = [n for n in nodes if self._cut_off.pop(n.node, "")]
            for node in nodes:
                self._post(ev.NodeWelcomed(node=node.node))
            if waited:
                return f"{name} is tried again at once: it and others did not reach each other"
            return f"{name} was neither drained nor in quarantine"
        self._journal.record(
            "node_cleared",
            node=cleared.node or name,
            machine=cleared.machine,
            state=cleared.state,
            reason="cleared by an operator",
        )
        for node in nodes:
            if self._excluded(node) is None:
                self._leaving.pop(node.node, None)
                node.stream.send(drain=pb.Drain(called_off=True))
                self._post(ev.NodeWelcomed(node=node.node))
        return f"{name} may take part again"

    # ---- for people

    def machines(self) -> set[str]:
        return set(self._machines.values())

    def statuses(self) -> list[pb.NodeStatus]:
        """Return the figures of all nodes for operators, sorted by name."""
        found = sorted(self.figures(), key=lambda node: (node.node, node.machine))
        return [_STATUS.to_pb(node) for node in found]

    def room(self) -> Iterator[int]:
        """Yield the number of slots of each node that takes part."""
        return (n.stream.slots for n in self._nodes if self._state(n) in WANTED)

    def figures(self) -> Iterator[NodeFigures]:
        """Yield the figures of the connected nodes, then of those that are only excluded."""
        now = time.monotonic()
        for node in self._nodes:
            excluded, hello = self._excluded(node), node.stream.hello
            yield NodeFigures(
                node=node.stream.node,
                state=self._state(node),
                failures=self._failures.failures(self._key(node.node), now),
                longest_pause_s=round(node.longest_pause_s, 3),
                host=node.stream.host,
                slots=node.stream.slots,
                reason=self._reason(node),
                since_unix_s=excluded.since_unix_s if excluded else node.connected_unix_s,
                machine=hello.machine,
                version=hello.version,
                workers=node.statuses,
            )
        for key in self._exclusions.names():
            kept_out = self._exclusions.get(key)
            if kept_out is not None and not self._nodes_of(key):
                yield NodeFigures(
                    node=kept_out.node or key,
                    state=kept_out.state,
                    connected=False,
                    reason=kept_out.reason,
                    since_unix_s=kept_out.since_unix_s,
                    machine=kept_out.machine,
                )

    def _state(self, node: ConnectedNode) -> str:
        excluded = self._excluded(node)
        leaving = node.node in self._leaving
        if excluded:
            return excluded.state
        return "leaving" if leaving else "unreachable" if node.node in self._cut_off else "ready"

    def _reason(self, node: ConnectedNode) -> str:
        """Why it is in its state."""
        excluded = self._excluded(node)
        if excluded is not None:
            return excluded.reason
        return self._leaving.get(node.node) or self._cut_off.get(node.node, "")

    # ---- which machine

    def _key(self, node: NodeId) -> str:
        """Return the name under which a node is kept out and its failures are counted."""
        return self._machines.get(node) or name_of(node)

    def _nodes_of(self, key: str) -> list[ConnectedNode]:
        """Return the connected nodes that an exclusion of `key` keeps out."""
        return [n for n in self._nodes if key in (self._key(n.node), *self._names_alone(n))]

    def _names_alone(self, node: ConnectedNode) -> tuple[str, ...]:
        """Return the node's name if it is excluded as a name, on whatever machine."""
        excluded = self._exclusions.get(node.stream.node)
        return (node.stream.node,) if excluded is not None and not excluded.machine else ()

    def _excluded(self, node: ConnectedNode) -> Exclusion | None:
        return self._exclusions.of(self._key(node.node), node.stream.node)

    def _resolve_name(self, name: str) -> tuple[str, bool]:
        """Return the key that an operator means, and whether it is known to be a machine's. Raises
        ConfigurationError if other nodes are on the machine of the node that is named."""
        machines = self.machines()
        on = {m for node, m in self._machines.items() if name_of(node) == name}
        attending = self._nodes.by_name(name)
        if attending is not None:
            on = {self._machines[attending.node]} if attending.node in self._machines else set()
        if not on and name not in machines and len(out := self._exclusions.named(name)) == 1:
            excluded = self._exclusions.get(out[0])
            return out[0], excluded is not None and bool(excluded.machine)
        if name in machines or len(on) != 1:
            return name, name in machines
        (machine,) = on
        others = [n.stream.node for n in self._nodes_of(machine) if n.stream.node != name]
        if others:
            raise ConfigurationError(
                f"node {name} shares machine {machine} with {', '.join(sorted(others))}: give the "
                "machine's name to mean all of them, or start their agents with different "
                "--machine names"
            )
        return machine, True

    # ---- inside

    def _quarantine(self, node: NodeId) -> None:
        key = self._key(node)
        others = [
            n for n in self._nodes if self._key(n.node) != key and n.node not in self._leaving
        ]
        if not others or self._exclusions.get(key) is not None:
            return
        count = self._failures.failures(key, time.monotonic())
        reason = f"{count} failures within {self._failures.window_s:g} s"
        self._exclusions.add_now(
            key, QUARANTINED, reason, node=name_of(node), is_machine=node in self._machines
        )
        self._tell_of(key)
        self._start(self._keep(key), "quarantine")

    async def _keep(self, key: str) -> None:
        try:
            await retry(lambda: self._exclusions.keep(key), f"keep {key} out")
        except GuardFailed:
            return  # the next leader does not know of it: the node comes back

    def _tell_of(self, key: str) -> None:
        excluded = self._exclusions.get(key)
        if excluded is None:  # cleared meanwhile
            return
        state, reason = excluded.state, excluded.reason
        self._journal.record(
            f"node_{state}", node=excluded.node or key, machine=excluded.machine, reason=reason
        )
        for one in self._nodes_of(key):
            self._leave(one, reason)

    def _leave(self, node: ConnectedNode, reason: str) -> None:
        self._leaving[node.node] = reason
        self._post(ev.NodeLeaving(node=node.node, reason=reason))


DRAINED, QUARANTINED = "drained", "quarantined"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """Why a machine is kept out, and since when."""

    state: str
    reason: str
    since_unix_s: float
    machine: str = ""
    """Empty: only a name is known, which a node or a machine may have. Either the node has not come
    yet, or an older version stored this."""
    node: str = ""
    """The name of a node on this machine; empty: unknown, or only a name is excluded."""


class Exclusions:
    """The exclusions by key, here and in the store. Writing raises what `put` raises."""

    def __init__(self, store: Store, *, job: str, guard: Guard) -> None:
        self._store = store
        self._keys = JobKeys(job)
        self._guard = guard
        self._excluded: dict[str, Exclusion] = {}
        self._writes = asyncio.Lock()  # a write under way must not store what was cleared

    async def load(self) -> None:
        """Load the exclusions that earlier leaders stored. Raises TransientError."""
        folders = {DRAINED: self._keys.draining, QUARANTINED: self._keys.quarantined}
        for state, folder in folders.items():
            for entry in await self._store.list(folder):
                self._excluded[node_of(entry.key)] = _exclusion(state, entry)

    def get(self, name: str) -> Exclusion | None:
        """Return the exclusion that has exactly this key; None if there is none."""
        return self._excluded.get(name)

    def of(self, machine: str, node: str) -> Exclusion | None:
        """Return the exclusion of a node with this name on this machine; None if there is none."""
        found = self._excluded.get(machine)
        if found is None and (by_name := self._excluded.get(node)) and not by_name.machine:
            found = by_name
        return found

    def names(self) -> list[str]:
        """Return all keys: machines, and names whose machine is unknown."""
        return sorted(self._excluded)

    def named(self, name: str) -> list[str]:
        """Return the keys that people may mean by the name of a machine or of a node on it."""
        if name in self._excluded:
            return [name]
        return [key for key in self.names() if self._excluded[key].node == name]

    async def add(
        self, name: str, state: str, reason: str, *, node: str = "", is_machine: bool = False
    ) -> None:
        """Keep the key out until it is cleared, once this is stored. `node`: the machine's node."""
        exclusion = _new(name, state, reason, node, is_machine=is_machine)
        async with self._writes:
            await self._put(name, exclusion)
            self._excluded[name] = exclusion

    def add_now(
        self, name: str, state: str, reason: str, *, node: str = "", is_machine: bool = False
    ) -> None:
        """Like `add`, but effective at once; `keep` stores it."""
        self._excluded[name] = _new(name, state, reason, node, is_machine=is_machine)

    async def keep(self, name: str) -> None:
        """Store the exclusion, unless it has been cleared."""
        async with self._writes:
            if (exclusion := self._excluded.get(name)) is not None:
                await self._put(name, exclusion)

    async def clear(self, name: str) -> Exclusion | None:
        """Remove an exclusion and return it; None if there is none."""
        async with self._writes:
            if name not in self._excluded:
                return None
            for state in (DRAINED, QUARANTINED):  # it may have been both, one after the other
                await self._store.delete(self._key(name, state), guard=self._guard)
            return self._excluded.pop(name, None)

    async def _put(self, name: str, exclusion: Exclusion) -> None:
        document = {
            "reason": exclusion.reason,
            "since_unix_s": exclusion.since_unix_s,
            "machine": exclusion.machine,
            "node": exclusion.node,
        }
        key = self._key(name, exclusion.state)
        await self._store.put(key, json.dumps(document).encode(), guard=self._guard)

    def _key(self, name: str, state: str) -> str:
        return self._keys.drain(name) if state == DRAINED else self._keys.quarantine(name)


def _new(name: str, state: str, reason: str, node: str, *, is_machine: bool) -> Exclusion:
    return Exclusion(
        state=state,
        reason=reason,
        since_unix_s=time.time(),
        machine=name if is_machine else "",
        node=node,
    )


def _exclusion(state: str, entry: Entry) -> Exclusion:
    """Parse an exclusion; an unreadable one still keeps out its name until it is cleared."""
    machine = node = ""
    try:
        document = json.loads(entry.value)
        reason, since_unix_s = str(document["reason"]), float(document["since_unix_s"])
        legible = is_utf8_encodable(reason) and is_representable_time(since_unix_s)
        if _is_name(document.get("machine")) and _is_name(document.get("node")):
            machine, node = document["machine"], document["node"]
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, AttributeError):
        legible = False
    if not legible:
        reason = f"marked as {state} by the store's key {entry.key}, which cannot be read"
        since_unix_s = time.time()
    if machine != node_of(entry.key):  # stored by an older version, or for a name alone
        machine = node = ""
    return Exclusion(
        state=state, reason=reason, since_unix_s=since_unix_s, machine=machine, node=node
    )


def _is_name(found: Any) -> bool:
    return isinstance(found, str) and is_utf8_encodable(found)
