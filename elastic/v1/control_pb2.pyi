from elastic.v1 import job_pb2 as _job_pb2
from elastic.v1 import local_pb2 as _local_pb2
from elastic.v1 import stacks_pb2 as _stacks_pb2
from elastic.v1 import timeline_pb2 as _timeline_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentHello(_message.Message):
    __slots__ = ("node", "host", "slots", "version", "command", "command_digest", "start_token", "classic", "isolation_timeout_s", "run_id", "ends_in_quarantine", "machine", "saves", "checkpoint_every", "start_secret", "probe_port")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    COMMAND_DIGEST_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CLASSIC_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ENDS_IN_QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_EVERY_FIELD_NUMBER: _ClassVar[int]
    START_SECRET_FIELD_NUMBER: _ClassVar[int]
    PROBE_PORT_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    slots: int
    version: str
    command: str
    command_digest: str
    start_token: str
    classic: bool
    isolation_timeout_s: float
    run_id: str
    ends_in_quarantine: bool
    machine: str
    saves: bool
    checkpoint_every: int
    start_secret: str
    probe_port: int
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., slots: _Optional[int] = ..., version: _Optional[str] = ..., command: _Optional[str] = ..., command_digest: _Optional[str] = ..., start_token: _Optional[str] = ..., classic: bool = ..., isolation_timeout_s: _Optional[float] = ..., run_id: _Optional[str] = ..., ends_in_quarantine: bool = ..., machine: _Optional[str] = ..., saves: bool = ..., checkpoint_every: _Optional[int] = ..., start_secret: _Optional[str] = ..., probe_port: _Optional[int] = ...) -> None: ...

class NodeView(_message.Message):
    __slots__ = ("workers", "longest_pause_s", "restarting")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    RESTARTING_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_job_pb2.WorkerStatus]
    longest_pause_s: float
    restarting: bool
    def __init__(self, workers: _Optional[_Iterable[_Union[_job_pb2.WorkerStatus, _Mapping]]] = ..., longest_pause_s: _Optional[float] = ..., restarting: bool = ...) -> None: ...

class AgentMessage(_message.Message):
    __slots__ = ("hello", "view", "failure", "progress", "reformed", "shard_saved", "save_failed", "ledger", "notice", "stop", "leave", "known", "leave_timed_out", "stacks", "worker_time", "curve", "worker_pace", "peers_probed", "pulse", "once")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REFORMED_FIELD_NUMBER: _ClassVar[int]
    SHARD_SAVED_FIELD_NUMBER: _ClassVar[int]
    SAVE_FAILED_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    LEAVE_TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    WORKER_TIME_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    WORKER_PACE_FIELD_NUMBER: _ClassVar[int]
    PEERS_PROBED_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    ONCE_FIELD_NUMBER: _ClassVar[int]
    hello: AgentHello
    view: NodeView
    failure: _job_pb2.Failure
    progress: _job_pb2.Progress
    reformed: _job_pb2.Reformed
    shard_saved: _job_pb2.ShardSaved
    save_failed: _job_pb2.SaveFailed
    ledger: _local_pb2.LedgerEntries
    notice: _local_pb2.Notice
    stop: StopRequest
    leave: LeaveRequest
    known: _job_pb2.Known
    leave_timed_out: LeaveTimedOut
    stacks: _stacks_pb2.NodeStacks
    worker_time: _job_pb2.WorkerTime
    curve: _local_pb2.CurvePoints
    worker_pace: _job_pb2.WorkerPace
    peers_probed: PeersProbed
    pulse: float
    once: Once
    def __init__(self, hello: _Optional[_Union[AgentHello, _Mapping]] = ..., view: _Optional[_Union[NodeView, _Mapping]] = ..., failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., progress: _Optional[_Union[_job_pb2.Progress, _Mapping]] = ..., reformed: _Optional[_Union[_job_pb2.Reformed, _Mapping]] = ..., shard_saved: _Optional[_Union[_job_pb2.ShardSaved, _Mapping]] = ..., save_failed: _Optional[_Union[_job_pb2.SaveFailed, _Mapping]] = ..., ledger: _Optional[_Union[_local_pb2.LedgerEntries, _Mapping]] = ..., notice: _Optional[_Union[_local_pb2.Notice, _Mapping]] = ..., stop: _Optional[_Union[StopRequest, _Mapping]] = ..., leave: _Optional[_Union[LeaveRequest, _Mapping]] = ..., known: _Optional[_Union[_job_pb2.Known, _Mapping]] = ..., leave_timed_out: _Optional[_Union[LeaveTimedOut, _Mapping]] = ..., stacks: _Optional[_Union[_stacks_pb2.NodeStacks, _Mapping]] = ..., worker_time: _Optional[_Union[_job_pb2.WorkerTime, _Mapping]] = ..., curve: _Optional[_Union[_local_pb2.CurvePoints, _Mapping]] = ..., worker_pace: _Optional[_Union[_job_pb2.WorkerPace, _Mapping]] = ..., peers_probed: _Optional[_Union[PeersProbed, _Mapping]] = ..., pulse: _Optional[float] = ..., once: _Optional[_Union[Once, _Mapping]] = ...) -> None: ...

class PeersProbed(_message.Message):
    __slots__ = ("number", "unreached")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    number: int
    unreached: _containers.RepeatedCompositeFieldContainer[Unreached]
    def __init__(self, number: _Optional[int] = ..., unreached: _Optional[_Iterable[_Union[Unreached, _Mapping]]] = ...) -> None: ...

class Unreached(_message.Message):
    __slots__ = ("worker", "why", "by_port")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BY_PORT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    why: str
    by_port: bool
    def __init__(self, worker: _Optional[str] = ..., why: _Optional[str] = ..., by_port: bool = ...) -> None: ...

class Once(_message.Message):
    __slots__ = ("source", "number", "age_s")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    source: str
    number: int
    age_s: float
    def __init__(self, source: _Optional[str] = ..., number: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class LeaveTimedOut(_message.Message):
    __slots__ = ("waited_s",)
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    waited_s: float
    def __init__(self, waited_s: _Optional[float] = ...) -> None: ...

class Replace(_message.Message):
    __slots__ = ("worker", "kind", "message", "place")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    kind: _job_pb2.FailureKind
    message: str
    place: str
    def __init__(self, worker: _Optional[str] = ..., kind: _Optional[_Union[_job_pb2.FailureKind, str]] = ..., message: _Optional[str] = ..., place: _Optional[str] = ...) -> None: ...

class JobEnded(_message.Message):
    __slots__ = ("exit_code", "message")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    message: str
    def __init__(self, exit_code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Stray(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("generation", "replace", "checkpoint", "ledger_stored", "dismiss", "job_ended", "probe", "refused", "drained", "drain", "stray", "keep_curve", "curve_stored", "stop", "stacks", "probe_peers", "once_stored", "pulse")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_STORED_FIELD_NUMBER: _ClassVar[int]
    DISMISS_FIELD_NUMBER: _ClassVar[int]
    JOB_ENDED_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    STRAY_FIELD_NUMBER: _ClassVar[int]
    KEEP_CURVE_FIELD_NUMBER: _ClassVar[int]
    CURVE_STORED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    PROBE_PEERS_FIELD_NUMBER: _ClassVar[int]
    ONCE_STORED_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    generation: _job_pb2.Generation
    replace: Replace
    checkpoint: _local_pb2.CheckpointCommitted
    ledger_stored: _local_pb2.LedgerStored
    dismiss: _local_pb2.Dismiss
    job_ended: JobEnded
    probe: Probe
    refused: Refused
    drained: Drained
    drain: Drain
    stray: Stray
    keep_curve: _local_pb2.KeepCurve
    curve_stored: _local_pb2.LedgerStored
    stop: StopRequest
    stacks: _stacks_pb2.StacksRequest
    probe_peers: ProbePeers
    once_stored: int
    pulse: float
    def __init__(self, generation: _Optional[_Union[_job_pb2.Generation, _Mapping]] = ..., replace: _Optional[_Union[Replace, _Mapping]] = ..., checkpoint: _Optional[_Union[_local_pb2.CheckpointCommitted, _Mapping]] = ..., ledger_stored: _Optional[_Union[_local_pb2.LedgerStored, _Mapping]] = ..., dismiss: _Optional[_Union[_local_pb2.Dismiss, _Mapping]] = ..., job_ended: _Optional[_Union[JobEnded, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., stray: _Optional[_Union[Stray, _Mapping]] = ..., keep_curve: _Optional[_Union[_local_pb2.KeepCurve, _Mapping]] = ..., curve_stored: _Optional[_Union[_local_pb2.LedgerStored, _Mapping]] = ..., stop: _Optional[_Union[StopRequest, _Mapping]] = ..., stacks: _Optional[_Union[_stacks_pb2.StacksRequest, _Mapping]] = ..., probe_peers: _Optional[_Union[ProbePeers, _Mapping]] = ..., once_stored: _Optional[int] = ..., pulse: _Optional[float] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbePeers(_message.Message):
    __slots__ = ("number", "peers", "within_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    within_s: float
    def __init__(self, number: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., within_s: _Optional[float] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker", "endpoint", "other_endpoint")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    OTHER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    endpoint: str
    other_endpoint: str
    def __init__(self, worker: _Optional[str] = ..., endpoint: _Optional[str] = ..., other_endpoint: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("message", "exit_code", "for_now")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    FOR_NOW_FIELD_NUMBER: _ClassVar[int]
    message: str
    exit_code: int
    for_now: bool
    def __init__(self, message: _Optional[str] = ..., exit_code: _Optional[int] = ..., for_now: bool = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("called_off",)
    CALLED_OFF_FIELD_NUMBER: _ClassVar[int]
    called_off: bool
    def __init__(self, called_off: bool = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ("reason", "exit_code")
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    exit_code: int
    def __init__(self, reason: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "host", "workers", "state", "slots", "version", "reason", "since_unix_s", "failures", "longest_pause_s", "machine")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LONGEST_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    workers: _containers.RepeatedCompositeFieldContainer[_job_pb2.WorkerStatus]
    state: str
    slots: int
    version: str
    reason: str
    since_unix_s: float
    failures: int
    longest_pause_s: float
    machine: str
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[_job_pb2.WorkerStatus, _Mapping]]] = ..., state: _Optional[str] = ..., slots: _Optional[int] = ..., version: _Optional[str] = ..., reason: _Optional[str] = ..., since_unix_s: _Optional[float] = ..., failures: _Optional[int] = ..., longest_pause_s: _Optional[float] = ..., machine: _Optional[str] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "phase", "generation", "nodes", "progress", "started_unix_s", "restarts", "max_restarts", "recoveries_json", "checkpoint_step", "checkpoint_dir", "coordinator", "leads", "longest_pause_s", "min_workers", "wanted_workers", "verdict", "verdict_unix_s", "accounts_json", "slow", "version", "certificate_expires_unix_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    RECOVERIES_JSON_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_DIR_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    MIN_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WANTED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTS_JSON_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    phase: str
    generation: _job_pb2.Generation
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    progress: _job_pb2.Progress
    started_unix_s: float
    restarts: int
    max_restarts: int
    recoveries_json: _containers.RepeatedScalarFieldContainer[str]
    checkpoint_step: int
    checkpoint_dir: str
    coordinator: str
    leads: bool
    longest_pause_s: float
    min_workers: int
    wanted_workers: int
    verdict: str
    verdict_unix_s: float
    accounts_json: str
    slow: _containers.RepeatedCompositeFieldContainer[SlowRank]
    version: str
    certificate_expires_unix_s: float
    def __init__(self, job: _Optional[str] = ..., phase: _Optional[str] = ..., generation: _Optional[_Union[_job_pb2.Generation, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., progress: _Optional[_Union[_job_pb2.Progress, _Mapping]] = ..., started_unix_s: _Optional[float] = ..., restarts: _Optional[int] = ..., max_restarts: _Optional[int] = ..., recoveries_json: _Optional[_Iterable[str]] = ..., checkpoint_step: _Optional[int] = ..., checkpoint_dir: _Optional[str] = ..., coordinator: _Optional[str] = ..., leads: bool = ..., longest_pause_s: _Optional[float] = ..., min_workers: _Optional[int] = ..., wanted_workers: _Optional[int] = ..., verdict: _Optional[str] = ..., verdict_unix_s: _Optional[float] = ..., accounts_json: _Optional[str] = ..., slow: _Optional[_Iterable[_Union[SlowRank, _Mapping]]] = ..., version: _Optional[str] = ..., certificate_expires_unix_s: _Optional[float] = ...) -> None: ...

class SlowRank(_message.Message):
    __slots__ = ("rank", "worker", "node", "slow_in", "late_s", "step_s", "since_step", "verdict")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOW_IN_FIELD_NUMBER: _ClassVar[int]
    LATE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SINCE_STEP_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    worker: str
    node: str
    slow_in: str
    late_s: float
    step_s: float
    since_step: int
    verdict: str
    def __init__(self, rank: _Optional[int] = ..., worker: _Optional[str] = ..., node: _Optional[str] = ..., slow_in: _Optional[str] = ..., late_s: _Optional[float] = ..., step_s: _Optional[float] = ..., since_step: _Optional[int] = ..., verdict: _Optional[str] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("reason", "exit_code")
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    exit_code: int
    def __init__(self, reason: _Optional[str] = ..., exit_code: _Optional[int] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node", "reason", "future")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FUTURE_FIELD_NUMBER: _ClassVar[int]
    node: str
    reason: str
    future: bool
    def __init__(self, node: _Optional[str] = ..., reason: _Optional[str] = ..., future: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class FollowEventsRequest(_message.Message):
    __slots__ = ("follow",)
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    follow: bool
    def __init__(self, follow: bool = ...) -> None: ...

class JournalEntry(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class GetIncidentsRequest(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class JobIncidents(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, json: _Optional[_Iterable[str]] = ...) -> None: ...
