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
    DRAIN_NODE = 13  # an operator drains it; another machine may take its place
    STOP_AGENT = 14  # the agent is stopped for a while, and the keeper may be; workers train on
    CUT_PEERS = 15  # nodes that reach the leader lose packets to each other for a while
    STOP_IN_STEP = 16  # the script is in a step that outlasts the grace of a stop that comes then


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
    STOP_AGENT,
    CUT_PEERS,
    STOP_IN_STEP,
) = Action

# Points that only some scripts reach.
SCRIPT_POINTS = ("top", "logged", "below", "run", "between", "loop ended", "undone", "set up")
# Points at which only chains of faults (chains.py) strike.
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
# Points at which only the progress deadline and the coordinator's timeouts notice a stuck script.
FREEZABLE = ("attached", "assigned", "join", "agree", "transfer", "step")


@dataclass(frozen=True, slots=True)
class Fault:
    """Strikes a process at an instant, or the n-th process that reaches a point."""

    action: Action
    _: KW_ONLY
    at_s: float | None = None
    point: str = ""
    nth: int = 1
    worker: str = ""
    """The worker to strike at `at_s`; empty: a random one. "b-": a worker of node b."""
    only: bool = False
    """Strike nobody if `worker` is not alive. Otherwise a random worker is struck in its place."""
    signature: str = ""
    """The signature of the exception; empty: another one for each worker and point."""
    returns_after_s: float | None = None
    """Seconds until the lost node, agent, leader or connection is back. None: a node stays lost."""
    together: bool = False
    """Strike only processes that ran when the first fault of this signature struck."""
    lasting: bool = False
    """Strike every process that reaches the point after the n-th, too."""
    newcomers: bool = False
    """Strike every newcomer that reaches the point while others train."""
    other: bool = False
    """Strike another member of the group, on another node, not the one at the point."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Of CUT_PEERS: the names of nodes; packets from the first one to the second one are lost."""
    since_s: float = 0.0
    """Count only processes that reach the point from this instant on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Bounds of how long things take, in seconds."""

    start_s: tuple[float, float] = (0.3, 1.5)
    prepare_s: tuple[float, float] = (0.05, 0.8)
    step_s: tuple[float, float] = (0.02, 0.1)
    compile_s: tuple[float, float] | None = None
    """Extra time for the first step of a process and for some later ones; None: no extra time."""
    reported_step_s: float = 0.06
    """The step time in progress reports. The more it is wrong, the worse changes are timed."""
    evaluation_s: float = 1.0
    return_s: tuple[float, float] = (0.05, 0.8)
    """Until a node finds a new leader."""
    transfer_s: float = 0.05
    """The longest that it takes to send the state to another member."""
    found_s: tuple[float, float] = (0.0, 0.3)
    """Until a worker finds the next agent of its node."""
    silence_s: tuple[float, float] = (0.5, 6.0)
    """Until an agent notices that a worker is frozen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that determines one history."""

    seed: int
    nodes: tuple[AgentSettings, ...]
    coordinator: CoordinatorSettings
    job: Job
    pace: Pace = field(default_factory=Pace)
    faults: tuple[Fault, ...] = ()
    news_s: float = 0.005
    """The longest that a message between coordinator and agent takes."""
    isolation_s: float = 4.0
    """A node that hears from neither leader nor store for this long ends its workers."""


def agent_settings(name: str, *, slots: int, spares: int) -> AgentSettings:
    return AgentSettings(
        node=name,
        slots=slots,
        spares=spares,
        backoff=Backoff(base_s=0.1, cap_s=2.0),
        start_timeout_s=8.0,
        exit_grace_s=1.0,
    )
