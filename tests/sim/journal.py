"""What happened in one history: the facts that the checkers read, and a trace to replay it by."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from elastic.core.data_order import SampleRange
from elastic.core.membership import Generation
from elastic.errors import Stranded
from tests.sim.replica import Job, Replica

# A stop with as much grace comes to its end, whatever strikes meanwhile.
_TIME_TO_SAVE_S = 20.0


class Commit(NamedTuple):
    """One worker committed one step."""

    at: float
    worker: str
    generation: int
    world_size: int
    loader: int
    samples: SampleRange
    before: int
    """The lineage that it went on from."""
    replica: Replica


class Called(NamedTuple):
    """One member's call of session.run() has returned."""

    at: float
    worker: str
    lineage: int
    number: int
    evaluation: int
    result: int


class Reduced(NamedTuple):
    """An all-reduce had every member's contribution."""

    at: float
    generation: int
    step: int


class Agreed(NamedTuple):
    """One member of a generation has the state that its group agreed on."""

    at: float
    worker: str
    generation: int
    begun: int
    """Steps it had begun before."""
    replica: Replica
    best_survivor: Replica | None
    """The most advanced replica in any responsive process at that moment."""
    checkpoint: Replica
    """The newest committed checkpoint when its generation was formed, or a blank replica."""


class Journal:
    """One history."""

    def __init__(self, job: Job, *, news_s: float = 0.0) -> None:
        self.job = job
        self.news_s = news_s
        """The longest that a message between coordinator and agent takes."""
        self.trace: list[tuple[Any, ...]] = []
        self.generations: list[Generation] = []
        self.commits: list[Commit] = []
        self.reduced: list[Reduced] = []
        self.called: list[Called] = []
        self.errors: list[tuple[str, str]] = []
        """What scripts raised: the type, and all of it."""
        self.in_run: set[int] = set()
        """Generations formed for members that were inside session.run()."""
        self.differed: list[str] = []
        """Members of one step that held different states."""
        self.undo_missed = False
        """Something changed that the undo had not copied: a state may be torn, or a commit mark
        lost."""
        self.nobody_held_state = False
        """A script said that the state was lost while no process that could go on held it whole."""
        self.unheard: list[str] = []
        """Workers with a slot that do not know of a generation that their agent was told of."""
        self.outlived: list[str] = []
        """Workers that live on although their node was cut off for so long that it gave up."""
        self.misreported: list[str] = []
        """Workers that an agent reports as starting although they were in a group."""
        self.agreed: list[Agreed] = []
        self.newest_checkpoint = Replica()
        self.torn_checkpoints: list[str] = []
        self.left_behind: list[str] = []
        self.outcome: tuple[str, int | None, str] = ("running", None, "")
        """Phase of the job, its exit code, message."""
        self.disturbed_at: list[float] = []
        """Instants of faults that excuse a planned change at which a step is begun again."""
        self.struck_at: list[float] = []
        """Instants of faults that can end a worker."""
        self.frozen_at_end = False
        """What is left of the state when the job ended is held by scripts that never run again."""
        self.stopped_at: float | None = None
        self.drains = False
        """Nodes were to leave: the job stops if all are."""
        self.nodes_drained: dict[str, int] = {}
        """Nodes that were told that they are not needed, and the newest generation then."""
        self.heard_of_drain: set[str] = set()
        """Those of them that have heard it: the news can be lost with a leader."""
        self.result: Replica | None = None
        """The most advanced replica in any responsive process when the job ended."""
        self.best_at_end: Replica | None = None
        """The same of those that were in contact when the last group was formed."""
        self.best_out_of_contact: Replica | None = None
        """The same of nodes that had lost contact so shortly before that they may come back."""
        self.finished_with: Replica | None = None
        """The same of those whose scripts had ended, also of those that were gone by then, which
        need not have been known."""
        self.certain_at: list[float] = []
        """When the store was certain of a node that nothing runs there any more."""
        self.struck: list[tuple[float, str, float]] = []
        """The faults: when they struck, what they did, and after how long they were over."""
        self.agent_grace_s = self.return_patience_s = self.first_step_s = 0.0
        self.evaluates = False
        """Members keep each other waiting in the middle of steps."""
        self.to_end: list[tuple[float, str]] = []
        """When, and which workers, a leader wanted ended, whatever their state."""
        self.join_timeout_s = 0.0
        self.replaced: list[tuple[float, str]] = []
        """When, and which workers, were ended because their group did without them."""
        self.hurried: list[str] = []
        """Those of them that had no time to hear of their group."""
        self.formed_at: dict[int, float] = {}
        self.newcomers_fail = False
        """Every newcomer to a group that trains raises."""
        self.failures_differ = False
        """Each in a way of its own."""
        self.compiles = False
        """Steps may last long without anybody being stuck."""
        self.broken_invariant = ""
        self.sizes = (1, 1)
        """The least and the most members that a group may have."""
        self.finished_at: dict[str, float] = {}
        """Workers whose scripts have ended well."""
        self.done_then: dict[int, int] = {}
        """By generation, the steps of a member that had finished, which was known."""
        self.begun_without: set[str] = set()
        """Workers that were out of contact when a group began without any of the group before."""
        self.declared: set[tuple[int, str]] = set()
        """(generation, member) of those that brought the state to their group."""
        self.dropped: list[tuple[float, str]] = []
        """When a worker has told that its state is not to be counted on, and which."""
        self.declared_last: dict[str, int] = {}
        """In which generation a worker has declared what it holds last."""
        self.inside_in: set[int] = set()
        """Generations in which a member declared that its script is inside a call or a block."""
        self.at_commit_in: dict[int, list[tuple[tuple[int, int], bool]]] = {}
        """By generation, how old the states are that its members declared to hold, and whether they
        have them as of the commit."""
        self.saves: list[tuple[float, bool]] = []
        """Instants at which a checkpoint was committed (True) or given up (False)."""
        self.elected_at: list[float] = []
        """Instants at which a leader was elected in place of another."""
        self.unreachable: dict[int, list[str]] = {}
        """By generation, its members that were known to be out of contact when it was formed."""
        self.saving: set[tuple[str, int, int]] = set()
        """Worker, generation and step of the parts that were begun to be saved."""
        self.torn_in: set[int] = set()
        """Generations with a member whose state, of at least one step, is torn."""
        self.sent_back: list[str] = []
        """Workers that were stranded as if the job had not begun, in a group with a member whose
        state of some steps was torn."""
        self.not_asked: dict[int, list[str]] = {}
        """By generation, members of the last one that had no time to find the new leader."""
        self.all_leave: set[int] = set()
        """Generations all of whose members are on nodes that leave."""
        self.held_in_vain: list[tuple[float, str, int]] = []
        """When, which members gave up waiting for which planned change to be settled."""
        self.false_claims: list[str] = []
        """Members that said they held the state while it was being overwritten."""
        self.slots_wasted: list[str] = []
        """Workers that were given a slot while their agents ended them."""
        self.taken_away: list[str] = []
        """States that went with a node which was let go, and that nobody else had."""
        self.enough_stayed: dict[int, list[str]] = {}
        """By generation without members, those that could have gone on."""
        self.finished_then: dict[int, int] = {}
        """By generation without members, how many were known to have finished, and were not killed
        since."""
        self.away: dict[int, Replica | None] = {}
        """By generation, the most advanced replica out of contact that was worth waiting for."""
        self.orphaned: dict[int, list[str]] = {}
        """By generation, saves that wait for a member whose process has ended."""
        self.in_contact_until: dict[int, dict[str, float]] = {}
        """By generation and member, until when its node was in contact before that was formed."""
        self.has_holder: set[int] = set()
        """Generations of which a member held the state whole when they were formed, as far as
        could be known."""
        self.awaited: dict[int, Replica | None] = {}
        """The same of members of a group that was dissolved, where it is the one before."""
        self.passed_over: dict[int, Replica | None] = {}
        """By generation, the most advanced replica in contact that is not in its group, though it
        was in one before."""
        self.drained_at: dict[str, float] = {}
        """When nodes were told that they are not needed."""
        self.broke: set[int] = set()
        """Generations whose groups broke under a member."""
        self.ready_at: dict[str, float] = {}
        """When workers were first ready for a group."""
        self.gather_timeout_s = 0.0
        self.given_up: list[str] = []
        """Saves that were given up although none of their writers was missing."""
        self.gone_at: dict[str, float] = {}
        """When workers ended, or froze."""
        self.left_from: dict[str, float] = {}
        """When nodes were to leave."""
        self.ended_at = math.inf
        """When the job did."""
        self.stop_grace_s = 0.0
        self.isolation_s = 0.0
        self.return_s = 0.0
        """In which nodes find a new leader."""
        self.found_s = 0.0
        """In which workers find a new agent."""
        self.outages: set[float] = set()
        """Instants from which on no node was in contact."""
        self.hopeless = False
        """The script fails at the same place whenever it gets there."""

    @property
    def overdue(self) -> bool:
        """The grace of a stop was short, and is spent: the job is left as it is."""
        short, asked_at = self.stop_grace_s < _TIME_TO_SAVE_S, self.stopped_at
        return short and asked_at is not None and self.ended_at >= asked_at + self.stop_grace_s

    def counted_as_gone(self, since: float) -> set[str]:
        """Workers that were to be ended, then or later. The order can be lost with the stream of an
        agent: workers that are still there when the leader's patience is over count again."""
        return {name for at, name in self.to_end if since < at + self.join_timeout_s}

    def note(self, *fact: Any) -> None:
        """Add a line to the trace: instant, who, what, details."""
        self.trace.append(fact)

    def raised(self, at: float, worker: str, error: Exception) -> None:
        """A script has failed."""
        self.note(at, worker, "raises", type(error).__name__, error)
        self.errors.append((type(error).__name__, str(error)))
        begins_again = isinstance(error, Stranded) and "the job begins again" in str(error)
        if begins_again and self.declared_last[worker] in self.torn_in:
            self.sent_back.append(worker)

    def drained(self, at: float, node: str) -> None:
        """The coordinator says that none of the node's workers is in the group."""
        self.note(at, node, "is drained")
        newest = self.generations[-1].number if self.generations else 0
        if node not in self.heard_of_drain:  # else it was told in vain before
            self.nodes_drained[node] = newest
        self.drained_at.setdefault(node, at)

    def fingerprint(self) -> str:
        """Equal for equal histories."""
        return hashlib.blake2b("\n".join(self.lines()).encode(), digest_size=16).hexdigest()

    def lines(self) -> Iterator[str]:
        for at, who, what, *details in self.trace:
            yield f"{at:9.4f}  {who:<12} {what} {' '.join(map(_text, details))}".rstrip()


def _text(detail: object) -> str:
    return detail.name if isinstance(detail, enum.Enum) else str(detail)
