"""A plan of one history: its cluster, its job and settings, and the faults that will strike."""

from __future__ import annotations

import enum
from dataclasses import KW_ONLY, dataclass, field

from elastic.core.agent.machine import AgentSettings
from elastic.core.coordinator.machine import CoordinatorSettings
from elastic.core.restarts import Backoff
from tests.sim.replica import Job


class Action(enum.Enum):
    """What a fault does."""

    KILL_WORKER = 1
    KILL_NODE = 2  # its kernel answers: peers see resets
    LOSE_NODE_SILENTLY = 3  # power loss: peers see nothing
    FREEZE_SCRIPT = 4  # the link's thread lives on
    FREEZE_PROCESS = 5
    RAISE = 6
    BREAK_LINK = 7  # a group's connection fails, nobody dies
    CUT_OFF_NODE = 8  # agent and coordinator lose each other for a while
    STOP = 9
    ADD_NODE = 10
    KILL_LEADER = 11
    RESTART_AGENT = 12
    DRAIN_NODE = 13  # it is to leave; another machine takes its place


(
    KILL_WORKER,
    KILL_NODE,
    LOSE_NODE_SILENTLY,
    FREEZE_SCRIPT,
    FREEZE_PROCESS,
    RAISE,
    BREAK_LINK,
    CUT_OFF_NODE,
    STOP,
    ADD_NODE,
    KILL_LEADER,
    RESTART_AGENT,
    DRAIN_NODE,
) = Action

# Only some scripts come to these.
SCRIPT_POINTS = ("top", "logged", "below", "run", "between", "loop ended", "undone", "set up")
# And to these some that no other kind of stress strikes at.
LAST_REDUCED = "last reduced"  # the last step of an epoch
GIVES = "gives"  # its state to another member
EVALUATED = "evaluated"

POINTS = (
    "attached",
    "assigned",
    "prepared",
    "join",
    "agree",
    "transfer",
    "joined",
    "step",
    "reduced",
    "committed",
    "saving",
    "done",
)
PERSISTED = "persisted"  # reached by the leader, which can be killed there
# Where only the progress deadline and the coordinator's patience can notice a stuck script.
FREEZABLE = ("attached", "assigned", "join", "agree", "transfer", "step")


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes some process at an instant, or whichever reaches a point as the n-th one."""

    action: Action
    _: KW_ONLY
    at_s: float | None = None
    point: str = ""
    nth: int = 1
    worker: str = ""
    """Whom it strikes at an instant; chosen by chance if empty. "b-": a worker of node b."""
    only: bool = False
    """If that one does not live it strikes nobody."""
    signature: str = ""
    """Of the exception raised; another one for each fault if empty."""
    returns_after_s: float | None = None
    """When a lost node is back; None: never."""
    together: bool = False
    """It strikes only what ran when the first fault of this signature struck."""
    lasting: bool = False
    """It strikes all that reach the point after the n-th, too."""
    newcomers: bool = False
    """It strikes every newcomer that reaches the point while others train."""
    other: bool = False
    """It strikes another member of the group, on another node."""
    since_s: float = 0.0
    """Who reaches the point earlier does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Bounds of how long things take, in seconds."""

    start_s: tuple[float, float] = (0.3, 1.5)
    prepare_s: tuple[float, float] = (0.05, 0.8)
    step_s: tuple[float, float] = (0.02, 0.1)
    compile_s: tuple[float, float] | None = None
    """How much longer the first step of a process takes, and some others; None: none does."""
    reported_step_s: float = 0.06
    """What reports of progress say: the farther off, the worse planned changes are timed."""
    evaluation_s: float = 1.0
    return_s: tuple[float, float] = (0.05, 0.8)
    """After which a node finds a new leader."""
    transfer_s: float = 0.05
    """How long it takes at most to send the state to another member."""
    found_s: tuple[float, float] = (0.0, 0.3)
    """In which workers find the next agent of their node."""
    silence_s: tuple[float, float] = (0.5, 6.0)
    """After which an agent misses a frozen worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One history before it has happened."""

    seed: int
    nodes: tuple[AgentSettings, ...]
    coordinator: CoordinatorSettings
    job: Job
    pace: Pace = field(default_factory=Pace)
    faults: tuple[Fault, ...] = ()
    news_s: float = 0.005
    """The longest that a message between coordinator and agent takes."""
    isolation_s: float = 4.0
    """Without leader and store a node ends its workers after this long."""


def agent_settings(name: str, *, slots: int, spares: int) -> AgentSettings:
    return AgentSettings(
        node=name,
        slots=slots,
        spares=spares,
        backoff=Backoff(base_s=0.1, cap_s=2.0),
        start_timeout_s=8.0,
        exit_grace_s=1.0,
    )
