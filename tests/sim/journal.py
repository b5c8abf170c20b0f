"""Records one history: the facts that the checkers read, and a trace for people."""

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

# A stop with this many seconds of grace completes, whatever strikes meanwhile.
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
    """The lineage before the step."""
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
    """How many steps it had begun before."""
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
        """The errors that scripts raised: type and message."""
        self.in_run: set[int] = set()
        """Generations formed for members that were inside session.run()."""
        self.differed: list[str] = []
        """Members of one step that held different states."""
        self.undo_missed = False
        """The undo missed a change: a state may be torn, or a commit mark lost."""
        self.nobody_held_state = False
        """A script raised StateLost while no process that could go on held the state whole."""
        self.unheard: list[str] = []
        """Workers with a slot that do not know a generation that their agent knows."""
        self.outlived: list[str] = []
        """Workers that live on although their node was cut off so long that it had to end them."""
        self.misreported: list[str] = []
        """Workers that an agent reports as starting although they started long ago."""
        self.agreed: list[Agreed] = []
        self.newest_checkpoint = Replica()
        self.torn_checkpoints: list[str] = []
        self.left_behind: list[str] = []
        self.outcome: tuple[str, int | None, str] = ("running", None, "")
        """The job's phase, exit code and message."""
        self.disturbed_at: list[float] = []
        """Instants of faults that excuse a planned change for a step that is begun again."""
        self.struck_at: list[float] = []
        """Instants of faults that can end a worker."""
        self.frozen_at_end = False
        """Only frozen scripts, which never run again, held the state when the job ended."""
        self.stopped_at: float | None = None
        self.drains = False
        """Nodes had to leave. If all have to, the job stops."""
        self.nodes_drained: dict[str, int] = {}
        """Nodes that the leader let go, and the newest generation at that time."""
        self.heard_of_drain: set[str] = set()
        """Those of them that have received the news: it can be lost with a leader."""
        self.result: Replica | None = None
        """The most advanced replica in any responsive process when the job ended."""
        self.best_at_end: Replica | None = None
        """The same for processes that were in contact when the last group was formed."""
        self.best_out_of_contact: Replica | None = None
        """The same for nodes that had lost contact so recently that they may come back."""
        self.finished_with: Replica | None = None
        """The same for workers whose scripts had finished, including those that were gone by then
        if the leader need not have known that."""
        self.certain_at: list[float] = []
        """Instants at which the store was certain that nothing of some node runs any more."""
        self.struck: list[tuple[float, str, float]] = []
        """The faults: when they struck, the action, and how many seconds they lasted."""
        self.agent_grace_s = self.return_patience_s = self.first_step_s = 0.0
        self.evaluates = False
        """Scripts make calls, in which members wait for each other between steps."""
        self.to_end: list[tuple[float, str]] = []
        """When a leader ordered a worker to be ended, and which, whatever its state."""
        self.join_timeout_s = 0.0
        self.replaced: list[tuple[float, str]] = []
        """When a worker was ended because its group went on without it, and which."""
        self.hurried: list[str] = []
        """The workers among them that had no time to hear of their group."""
        self.formed_at: dict[int, float] = {}
        self.newcomers_fail = False
        """Every newcomer to a group that trains fails."""
        self.failures_differ = False
        """Each of these newcomers fails in a different way."""
        self.compiles = False
        """Steps may last long although no member is stuck."""
        self.broken_invariant = ""
        self.sizes = (1, 1)
        """The least and the most members that a group may have."""
        self.finished_at: dict[str, float] = {}
        """When workers reported that their scripts had finished."""
        self.done_then: dict[int, int] = {}
        """By generation, the most steps of a member that was known to have finished."""
        self.begun_without: set[str] = set()
        """Workers out of contact when a group began without any member of the group before."""
        self.declared: set[tuple[int, str]] = set()
        """(generation, member) of the members that declared a whole state in their group."""
        self.dropped: list[tuple[float, str]] = []
        """When a worker reported that its state must no longer be counted on, and which."""
        self.declared_last: dict[str, int] = {}
        """By worker, the generation in which it last declared its state."""
        self.inside_in: set[int] = set()
        """Generations in which a member declared that its script is inside a call or a block."""
        self.at_commit_in: dict[int, list[tuple[tuple[int, int], bool]]] = {}
        """By generation, the age of each whole state that members declared, and whether they have
        it as of the commit."""
        self.saves: list[tuple[float, bool]] = []
        """Instants at which a checkpoint was committed (True) or given up (False)."""
        self.elected_at: list[float] = []
        """Instants at which a leader was elected in place of another."""
        self.unreachable: dict[int, list[str]] = {}
        """By generation, its members that were known to be out of contact when it was formed."""
        self.saving: set[tuple[str, int, int]] = set()
        """Worker, generation and step of the parts whose saving has begun."""
        self.torn_in: set[int] = set()
        """Generations with a member whose state, of one step or more, is torn."""
        self.sent_back: list[str] = []
        """Workers that were stranded because the job begins again, in a group with a member whose
        torn state had committed steps."""
        self.not_asked: dict[int, list[str]] = {}
        """By generation, members of the previous one that had no time to find the new leader."""
        self.all_leave: set[int] = set()
        """Generations all of whose members are on nodes that leave."""
        self.held_in_vain: list[tuple[float, str, int]] = []
        """When a member gave up waiting for a planned change, which member, which generation."""
        self.false_claims: list[str] = []
        """Members that reported that they hold the state while it was torn."""
        self.tainted_in_vain: list[str] = []
        """Members whose states did not count although they were in contact all the time."""
        self.slots_wasted: list[str] = []
        """Workers that got a slot while their agents ended them."""
        self.taken_away: list[str] = []
        """Nodes that were let go with a state that no other node had."""
        self.enough_stayed: dict[int, list[str]] = {}
        """By generation without members, the members that could have gone on."""
        self.finished_then: dict[int, int] = {}
        """By generation without members, how many workers were known to have finished and have not
        been killed since."""
        self.away: dict[int, Replica | None] = {}
        """By generation, the most advanced replica out of contact that was worth waiting for."""
        self.orphaned: dict[int, list[str]] = {}
        """By generation, saves that wait for a member whose process has ended."""
        self.in_contact_until: dict[int, dict[str, float]] = {}
        """By generation and member, until when the leader had heard from the member's node."""
        self.has_holder: set[int] = set()
        """Generations with a member that, as far as the leader could know, held the state whole
        when they were formed."""
        self.awaited: dict[int, Replica | None] = {}
        """By generation that follows a dissolved group, the most advanced replica of that group's
        members that is out of contact and worth waiting for."""
        self.passed_over: dict[int, Replica | None] = {}
        """By generation, the most advanced replica in contact that is not in its group, although it
        was in an earlier one."""
        self.drained_at: dict[str, float] = {}
        """When the leader let nodes go."""
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
        """When nodes were ordered to leave."""
        self.ended_at = math.inf
        self.stop_grace_s = 0.0
        self.isolation_s = 0.0
        self.return_s = 0.0
        """The longest that nodes take to find a new leader."""
        self.found_s = 0.0
        """The longest that workers take to find a new agent."""
        self.outages: set[float] = set()
        """Instants from which on every node was cut off."""
        self.hopeless = False
        """The script fails whenever it reaches a certain place."""

    @property
    def overdue(self) -> bool:
        """True if a stop's grace is spent, and was short, or a worker froze when too little of it
        was left: the job ends as it is."""
        if self.stopped_at is None:
            return False
        over_at = self.stopped_at + self.stop_grace_s
        late = any(over_at - _TIME_TO_SAVE_S < at < over_at for at in self.gone_at.values())
        return (self.stop_grace_s < _TIME_TO_SAVE_S or late) and self.ended_at >= over_at

    def counted_as_gone(self, since: float) -> set[str]:
        """Workers that a leader ordered to be ended shortly before `since` or later. An agent's
        stream that breaks can lose the order: workers that are still there after `join_timeout_s`
        count again."""
        return {name for at, name in self.to_end if since < at + self.join_timeout_s}

    def note(self, *fact: Any) -> None:
        """Add a line to the trace: instant, name, what happened, details."""
        self.trace.append(fact)

    def raised(self, at: float, worker: str, error: Exception) -> None:
        self.note(at, worker, "raises", type(error).__name__, error)
        self.errors.append((type(error).__name__, str(error)))
        begins_again = isinstance(error, Stranded) and "the job begins again" in str(error)
        if begins_again and self.declared_last[worker] in self.torn_in:
            self.sent_back.append(worker)

    def drained(self, at: float, node: str) -> None:
        self.note(at, node, "is drained")
        newest = self.generations[-1].number if self.generations else 0
        if node not in self.heard_of_drain:  # otherwise earlier news was lost
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
