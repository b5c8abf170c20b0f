from elastic.v1 import stacks_pb2 as _stacks_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChangeReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHANGE_REASON_UNSPECIFIED: _ClassVar[ChangeReason]
    CHANGE_REASON_STARTED: _ClassVar[ChangeReason]
    CHANGE_REASON_MEMBER_LOST: _ClassVar[ChangeReason]
    CHANGE_REASON_MEMBER_JOINED: _ClassVar[ChangeReason]
    CHANGE_REASON_GROUP_BROKEN: _ClassVar[ChangeReason]
    CHANGE_REASON_JOIN_TIMED_OUT: _ClassVar[ChangeReason]
    CHANGE_REASON_BELOW_MINIMUM: _ClassVar[ChangeReason]
    CHANGE_REASON_STALLED: _ClassVar[ChangeReason]
    CHANGE_REASON_STOPPING: _ClassVar[ChangeReason]
    CHANGE_REASON_MEMBER_LEAVING: _ClassVar[ChangeReason]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    PURPOSE_TRAIN: _ClassVar[Purpose]
    PURPOSE_SAVE_AND_LEAVE: _ClassVar[Purpose]

class WorkerPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_PHASE_UNSPECIFIED: _ClassVar[WorkerPhase]
    WORKER_PHASE_STARTING: _ClassVar[WorkerPhase]
    WORKER_PHASE_SPARE: _ClassVar[WorkerPhase]
    WORKER_PHASE_PREPARING: _ClassVar[WorkerPhase]
    WORKER_PHASE_READY: _ClassVar[WorkerPhase]
    WORKER_PHASE_JOINING: _ClassVar[WorkerPhase]
    WORKER_PHASE_TRAINING: _ClassVar[WorkerPhase]
    WORKER_PHASE_FINISHED: _ClassVar[WorkerPhase]

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_SIGNAL: _ClassVar[FailureKind]
    FAILURE_KIND_EXCEPTION: _ClassVar[FailureKind]
    FAILURE_KIND_EXIT_CODE: _ClassVar[FailureKind]
    FAILURE_KIND_START_TIMEOUT: _ClassVar[FailureKind]
    FAILURE_KIND_LEFT_OUT: _ClassVar[FailureKind]
    FAILURE_KIND_SLOW: _ClassVar[FailureKind]
CHANGE_REASON_UNSPECIFIED: ChangeReason
CHANGE_REASON_STARTED: ChangeReason
CHANGE_REASON_MEMBER_LOST: ChangeReason
CHANGE_REASON_MEMBER_JOINED: ChangeReason
CHANGE_REASON_GROUP_BROKEN: ChangeReason
CHANGE_REASON_JOIN_TIMED_OUT: ChangeReason
CHANGE_REASON_BELOW_MINIMUM: ChangeReason
CHANGE_REASON_STALLED: ChangeReason
CHANGE_REASON_STOPPING: ChangeReason
CHANGE_REASON_MEMBER_LEAVING: ChangeReason
PURPOSE_UNSPECIFIED: Purpose
PURPOSE_TRAIN: Purpose
PURPOSE_SAVE_AND_LEAVE: Purpose
WORKER_PHASE_UNSPECIFIED: WorkerPhase
WORKER_PHASE_STARTING: WorkerPhase
WORKER_PHASE_SPARE: WorkerPhase
WORKER_PHASE_PREPARING: WorkerPhase
WORKER_PHASE_READY: WorkerPhase
WORKER_PHASE_JOINING: WorkerPhase
WORKER_PHASE_TRAINING: WorkerPhase
WORKER_PHASE_FINISHED: WorkerPhase
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_SIGNAL: FailureKind
FAILURE_KIND_EXCEPTION: FailureKind
FAILURE_KIND_EXIT_CODE: FailureKind
FAILURE_KIND_START_TIMEOUT: FailureKind
FAILURE_KIND_LEFT_OUT: FailureKind
FAILURE_KIND_SLOW: FailureKind

class Member(_message.Message):
    __slots__ = ("worker", "node", "slot", "endpoint", "counts_from")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FROM_FIELD_NUMBER: _ClassVar[int]
    worker: str
    node: str
    slot: int
    endpoint: str
    counts_from: int
    def __init__(self, worker: _Optional[str] = ..., node: _Optional[str] = ..., slot: _Optional[int] = ..., endpoint: _Optional[str] = ..., counts_from: _Optional[int] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("number", "incarnation", "members", "reason", "leave_after", "purpose", "save_first", "provisional", "restart_count", "max_restarts", "begun", "frozen", "queues")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEAVE_AFTER_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIRST_FIELD_NUMBER: _ClassVar[int]
    PROVISIONAL_FIELD_NUMBER: _ClassVar[int]
    RESTART_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    number: int
    incarnation: str
    members: _containers.RepeatedCompositeFieldContainer[Member]
    reason: ChangeReason
    leave_after: int
    purpose: Purpose
    save_first: bool
    provisional: bool
    restart_count: int
    max_restarts: int
    begun: bool
    frozen: _containers.RepeatedScalarFieldContainer[str]
    queues: bool
    def __init__(self, number: _Optional[int] = ..., incarnation: _Optional[str] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., reason: _Optional[_Union[ChangeReason, str]] = ..., leave_after: _Optional[int] = ..., purpose: _Optional[_Union[Purpose, str]] = ..., save_first: bool = ..., provisional: bool = ..., restart_count: _Optional[int] = ..., max_restarts: _Optional[int] = ..., begun: bool = ..., frozen: _Optional[_Iterable[str]] = ..., queues: bool = ...) -> None: ...

class StoredGeneration(_message.Message):
    __slots__ = ("newest", "may_train", "command", "command_digest", "loss")
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    MAY_TRAIN_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    COMMAND_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    newest: Generation
    may_train: _containers.RepeatedCompositeFieldContainer[Generation]
    command: str
    command_digest: str
    loss: Loss
    def __init__(self, newest: _Optional[_Union[Generation, _Mapping]] = ..., may_train: _Optional[_Iterable[_Union[Generation, _Mapping]]] = ..., command: _Optional[str] = ..., command_digest: _Optional[str] = ..., loss: _Optional[_Union[Loss, _Mapping]] = ...) -> None: ...

class Loss(_message.Message):
    __slots__ = ("reason", "workers", "incident")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    INCIDENT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    workers: _containers.RepeatedScalarFieldContainer[str]
    incident: bytes
    def __init__(self, reason: _Optional[str] = ..., workers: _Optional[_Iterable[str]] = ..., incident: _Optional[bytes] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "phase", "slot", "generation", "broken", "detail", "committed", "endpoint", "pid", "has_state", "trained_in", "in_run", "compiling", "acknowledged", "queues")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HAS_STATE_FIELD_NUMBER: _ClassVar[int]
    TRAINED_IN_FIELD_NUMBER: _ClassVar[int]
    IN_RUN_FIELD_NUMBER: _ClassVar[int]
    COMPILING_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    phase: WorkerPhase
    slot: int
    generation: int
    broken: bool
    detail: str
    committed: int
    endpoint: str
    pid: int
    has_state: bool
    trained_in: int
    in_run: bool
    compiling: int
    acknowledged: int
    queues: bool
    def __init__(self, worker: _Optional[str] = ..., phase: _Optional[_Union[WorkerPhase, str]] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ..., broken: bool = ..., detail: _Optional[str] = ..., committed: _Optional[int] = ..., endpoint: _Optional[str] = ..., pid: _Optional[int] = ..., has_state: bool = ..., trained_in: _Optional[int] = ..., in_run: bool = ..., compiling: _Optional[int] = ..., acknowledged: _Optional[int] = ..., queues: bool = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("worker", "kind", "code", "signature", "message", "traceback", "retryable", "log", "log_tail", "place", "state_lost", "committed", "committed_in")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    LOG_TAIL_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    STATE_LOST_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IN_FIELD_NUMBER: _ClassVar[int]
    worker: str
    kind: FailureKind
    code: int
    signature: str
    message: str
    traceback: str
    retryable: bool
    log: str
    log_tail: str
    place: str
    state_lost: bool
    committed: int
    committed_in: int
    def __init__(self, worker: _Optional[str] = ..., kind: _Optional[_Union[FailureKind, str]] = ..., code: _Optional[int] = ..., signature: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., retryable: bool = ..., log: _Optional[str] = ..., log_tail: _Optional[str] = ..., place: _Optional[str] = ..., state_lost: bool = ..., committed: _Optional[int] = ..., committed_in: _Optional[int] = ...) -> None: ...

class FileDigest(_message.Message):
    __slots__ = ("name", "size_bytes", "xxh3_128")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    XXH3_128_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    xxh3_128: str
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., xxh3_128: _Optional[str] = ...) -> None: ...

class ShardSaved(_message.Message):
    __slots__ = ("worker", "step", "generation", "index", "count", "files", "epoch", "cursor", "learning_rate_json", "stall_s", "write_s", "began_at")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_JSON_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    WRITE_S_FIELD_NUMBER: _ClassVar[int]
    BEGAN_AT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    step: int
    generation: int
    index: int
    count: int
    files: _containers.RepeatedCompositeFieldContainer[FileDigest]
    epoch: int
    cursor: int
    learning_rate_json: str
    stall_s: float
    write_s: float
    began_at: int
    def __init__(self, worker: _Optional[str] = ..., step: _Optional[int] = ..., generation: _Optional[int] = ..., index: _Optional[int] = ..., count: _Optional[int] = ..., files: _Optional[_Iterable[_Union[FileDigest, _Mapping]]] = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., learning_rate_json: _Optional[str] = ..., stall_s: _Optional[float] = ..., write_s: _Optional[float] = ..., began_at: _Optional[int] = ...) -> None: ...

class SaveFailed(_message.Message):
    __slots__ = ("worker", "step", "generation", "message", "retried")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRIED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    step: int
    generation: int
    message: str
    retried: bool
    def __init__(self, worker: _Optional[str] = ..., step: _Optional[int] = ..., generation: _Optional[int] = ..., message: _Optional[str] = ..., retried: bool = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("worker", "generation", "committed", "epoch", "step_s", "samples_per_s", "longest_step_s", "in_step_s", "reported", "probed", "first_step", "compiling", "waiting_s", "collectives", "quiet_s", "step_counts", "steps_total_s", "samples", "place", "place_s", "spent", "pace", "global_batch", "learning_rates")
    class ReportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LearningRatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LONGEST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    IN_STEP_S_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    COMPILING_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    QUIET_S_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PLACE_S_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_BATCH_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    generation: int
    committed: int
    epoch: int
    step_s: float
    samples_per_s: float
    longest_step_s: float
    in_step_s: float
    reported: _containers.ScalarMap[str, float]
    probed: bool
    first_step: bool
    compiling: bool
    waiting_s: float
    collectives: int
    quiet_s: float
    step_counts: _containers.RepeatedScalarFieldContainer[int]
    steps_total_s: float
    samples: int
    place: _stacks_pb2.Place
    place_s: float
    spent: TimeSpent
    pace: Pace
    global_batch: int
    learning_rates: _containers.ScalarMap[str, float]
    def __init__(self, worker: _Optional[str] = ..., generation: _Optional[int] = ..., committed: _Optional[int] = ..., epoch: _Optional[int] = ..., step_s: _Optional[float] = ..., samples_per_s: _Optional[float] = ..., longest_step_s: _Optional[float] = ..., in_step_s: _Optional[float] = ..., reported: _Optional[_Mapping[str, float]] = ..., probed: bool = ..., first_step: bool = ..., compiling: bool = ..., waiting_s: _Optional[float] = ..., collectives: _Optional[int] = ..., quiet_s: _Optional[float] = ..., step_counts: _Optional[_Iterable[int]] = ..., steps_total_s: _Optional[float] = ..., samples: _Optional[int] = ..., place: _Optional[_Union[_stacks_pb2.Place, str]] = ..., place_s: _Optional[float] = ..., spent: _Optional[_Union[TimeSpent, _Mapping]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., global_batch: _Optional[int] = ..., learning_rates: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("generation", "committed", "steps", "total_s", "data_s", "transfer_s", "wait_s", "after_s", "between_s", "arrivals", "reductions", "no_core_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    DATA_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_S_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_S_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    REDUCTIONS_FIELD_NUMBER: _ClassVar[int]
    NO_CORE_S_FIELD_NUMBER: _ClassVar[int]
    generation: int
    committed: int
    steps: int
    total_s: float
    data_s: float
    transfer_s: float
    wait_s: float
    after_s: float
    between_s: float
    arrivals: int
    reductions: int
    no_core_s: float
    def __init__(self, generation: _Optional[int] = ..., committed: _Optional[int] = ..., steps: _Optional[int] = ..., total_s: _Optional[float] = ..., data_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., after_s: _Optional[float] = ..., between_s: _Optional[float] = ..., arrivals: _Optional[int] = ..., reductions: _Optional[int] = ..., no_core_s: _Optional[float] = ...) -> None: ...

class WorkerPace(_message.Message):
    __slots__ = ("worker", "pace")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    pace: Pace
    def __init__(self, worker: _Optional[str] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ...) -> None: ...

class TimeSpent(_message.Message):
    __slots__ = ("generation", "committed", "steps", "steps_s", "data_s", "calls_s", "saves_s", "own_s", "first_steps_s", "given_up_s", "regroup_s", "join_s", "sync_s")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_S_FIELD_NUMBER: _ClassVar[int]
    DATA_S_FIELD_NUMBER: _ClassVar[int]
    CALLS_S_FIELD_NUMBER: _ClassVar[int]
    SAVES_S_FIELD_NUMBER: _ClassVar[int]
    OWN_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEPS_S_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_S_FIELD_NUMBER: _ClassVar[int]
    REGROUP_S_FIELD_NUMBER: _ClassVar[int]
    JOIN_S_FIELD_NUMBER: _ClassVar[int]
    SYNC_S_FIELD_NUMBER: _ClassVar[int]
    generation: int
    committed: int
    steps: int
    steps_s: float
    data_s: float
    calls_s: float
    saves_s: float
    own_s: float
    first_steps_s: float
    given_up_s: float
    regroup_s: float
    join_s: float
    sync_s: float
    def __init__(self, generation: _Optional[int] = ..., committed: _Optional[int] = ..., steps: _Optional[int] = ..., steps_s: _Optional[float] = ..., data_s: _Optional[float] = ..., calls_s: _Optional[float] = ..., saves_s: _Optional[float] = ..., own_s: _Optional[float] = ..., first_steps_s: _Optional[float] = ..., given_up_s: _Optional[float] = ..., regroup_s: _Optional[float] = ..., join_s: _Optional[float] = ..., sync_s: _Optional[float] = ...) -> None: ...

class WorkerTime(_message.Message):
    __slots__ = ("worker", "spent")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    spent: TimeSpent
    def __init__(self, worker: _Optional[str] = ..., spent: _Optional[_Union[TimeSpent, _Mapping]] = ...) -> None: ...

class Reformed(_message.Message):
    __slots__ = ("worker", "generation", "committed", "abort_s", "join_s", "sync_s", "first_step_s", "bytes_received", "recomputed", "source", "spent", "out_s")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ABORT_S_FIELD_NUMBER: _ClassVar[int]
    JOIN_S_FIELD_NUMBER: _ClassVar[int]
    SYNC_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    OUT_S_FIELD_NUMBER: _ClassVar[int]
    worker: str
    generation: int
    committed: int
    abort_s: float
    join_s: float
    sync_s: float
    first_step_s: float
    bytes_received: int
    recomputed: int
    source: str
    spent: TimeSpent
    out_s: float
    def __init__(self, worker: _Optional[str] = ..., generation: _Optional[int] = ..., committed: _Optional[int] = ..., abort_s: _Optional[float] = ..., join_s: _Optional[float] = ..., sync_s: _Optional[float] = ..., first_step_s: _Optional[float] = ..., bytes_received: _Optional[int] = ..., recomputed: _Optional[int] = ..., source: _Optional[str] = ..., spent: _Optional[_Union[TimeSpent, _Mapping]] = ..., out_s: _Optional[float] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("step", "epoch", "generation", "world_size", "start", "stop", "run", "loader")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    step: int
    epoch: int
    generation: int
    world_size: int
    start: int
    stop: int
    run: str
    loader: int
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., generation: _Optional[int] = ..., world_size: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., run: _Optional[str] = ..., loader: _Optional[int] = ...) -> None: ...

class CurvePoint(_message.Message):
    __slots__ = ("step", "generation", "run", "unix_s", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    step: int
    generation: int
    run: str
    unix_s: float
    values: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., generation: _Optional[int] = ..., run: _Optional[str] = ..., unix_s: _Optional[float] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Known(_message.Message):
    __slots__ = ("newest", "before")
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    newest: Generation
    before: Generation
    def __init__(self, newest: _Optional[_Union[Generation, _Mapping]] = ..., before: _Optional[_Union[Generation, _Mapping]] = ...) -> None: ...
