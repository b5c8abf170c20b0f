from elastic.v1 import job_pb2 as _job_pb2
from elastic.v1 import stacks_pb2 as _stacks_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("worker", "pid")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    worker: str
    pid: int
    def __init__(self, worker: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class LedgerEntries(_message.Message):
    __slots__ = ("entries", "whole", "generation")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[_job_pb2.LedgerEntry]
    whole: bool
    generation: int
    def __init__(self, entries: _Optional[_Iterable[_Union[_job_pb2.LedgerEntry, _Mapping]]] = ..., whole: bool = ..., generation: _Optional[int] = ...) -> None: ...

class CurvePoints(_message.Message):
    __slots__ = ("points", "whole", "generation")
    POINTS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[_job_pb2.CurvePoint]
    whole: bool
    generation: int
    def __init__(self, points: _Optional[_Iterable[_Union[_job_pb2.CurvePoint, _Mapping]]] = ..., whole: bool = ..., generation: _Optional[int] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("name", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "status", "progress", "reformed", "failure", "shard_saved", "save_failed", "ledger", "notice", "known", "curve", "stacks")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REFORMED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SHARD_SAVED_FIELD_NUMBER: _ClassVar[int]
    SAVE_FAILED_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    status: _job_pb2.WorkerStatus
    progress: _job_pb2.Progress
    reformed: _job_pb2.Reformed
    failure: _job_pb2.Failure
    shard_saved: _job_pb2.ShardSaved
    save_failed: _job_pb2.SaveFailed
    ledger: LedgerEntries
    notice: Notice
    known: _job_pb2.Known
    curve: CurvePoints
    stacks: _stacks_pb2.WorkerStacks
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., status: _Optional[_Union[_job_pb2.WorkerStatus, _Mapping]] = ..., progress: _Optional[_Union[_job_pb2.Progress, _Mapping]] = ..., reformed: _Optional[_Union[_job_pb2.Reformed, _Mapping]] = ..., failure: _Optional[_Union[_job_pb2.Failure, _Mapping]] = ..., shard_saved: _Optional[_Union[_job_pb2.ShardSaved, _Mapping]] = ..., save_failed: _Optional[_Union[_job_pb2.SaveFailed, _Mapping]] = ..., ledger: _Optional[_Union[LedgerEntries, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., known: _Optional[_Union[_job_pb2.Known, _Mapping]] = ..., curve: _Optional[_Union[CurvePoints, _Mapping]] = ..., stacks: _Optional[_Union[_stacks_pb2.WorkerStacks, _Mapping]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("slot", "host", "checkpoint_dir", "checkpoint_every", "ledger", "join_timeout_s", "local_world_size", "job", "first_port", "last_port", "curve")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_DIR_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_EVERY_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    JOIN_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    LOCAL_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    FIRST_PORT_FIELD_NUMBER: _ClassVar[int]
    LAST_PORT_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    host: str
    checkpoint_dir: str
    checkpoint_every: int
    ledger: bool
    join_timeout_s: float
    local_world_size: int
    job: str
    first_port: int
    last_port: int
    curve: bool
    def __init__(self, slot: _Optional[int] = ..., host: _Optional[str] = ..., checkpoint_dir: _Optional[str] = ..., checkpoint_every: _Optional[int] = ..., ledger: bool = ..., join_timeout_s: _Optional[float] = ..., local_world_size: _Optional[int] = ..., job: _Optional[str] = ..., first_port: _Optional[int] = ..., last_port: _Optional[int] = ..., curve: bool = ...) -> None: ...

class KeepCurve(_message.Message):
    __slots__ = ("keep",)
    KEEP_FIELD_NUMBER: _ClassVar[int]
    keep: bool
    def __init__(self, keep: bool = ...) -> None: ...

class CheckpointCommitted(_message.Message):
    __slots__ = ("step", "abandoned", "generation")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    step: int
    abandoned: bool
    generation: int
    def __init__(self, step: _Optional[int] = ..., abandoned: bool = ..., generation: _Optional[int] = ...) -> None: ...

class LedgerStored(_message.Message):
    __slots__ = ("committed", "generation", "run", "send_again")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEND_AGAIN_FIELD_NUMBER: _ClassVar[int]
    committed: int
    generation: int
    run: str
    send_again: bool
    def __init__(self, committed: _Optional[int] = ..., generation: _Optional[int] = ..., run: _Optional[str] = ..., send_again: bool = ...) -> None: ...

class Dismiss(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportAgain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeProgress(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Terminate(_message.Message):
    __slots__ = ("group_after_s", "signal")
    GROUP_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    group_after_s: float
    signal: int
    def __init__(self, group_after_s: _Optional[float] = ..., signal: _Optional[int] = ...) -> None: ...

class NodeLeaves(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("assignment", "generation", "checkpoint", "ledger_stored", "dismiss", "report_again", "probe", "terminate", "keep_curve", "curve_stored", "node_leaves", "stacks")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_STORED_FIELD_NUMBER: _ClassVar[int]
    DISMISS_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGAIN_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    TERMINATE_FIELD_NUMBER: _ClassVar[int]
    KEEP_CURVE_FIELD_NUMBER: _ClassVar[int]
    CURVE_STORED_FIELD_NUMBER: _ClassVar[int]
    NODE_LEAVES_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    generation: _job_pb2.Generation
    checkpoint: CheckpointCommitted
    ledger_stored: LedgerStored
    dismiss: Dismiss
    report_again: ReportAgain
    probe: ProbeProgress
    terminate: Terminate
    keep_curve: KeepCurve
    curve_stored: LedgerStored
    node_leaves: NodeLeaves
    stacks: _stacks_pb2.StacksRequest
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., generation: _Optional[_Union[_job_pb2.Generation, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointCommitted, _Mapping]] = ..., ledger_stored: _Optional[_Union[LedgerStored, _Mapping]] = ..., dismiss: _Optional[_Union[Dismiss, _Mapping]] = ..., report_again: _Optional[_Union[ReportAgain, _Mapping]] = ..., probe: _Optional[_Union[ProbeProgress, _Mapping]] = ..., terminate: _Optional[_Union[Terminate, _Mapping]] = ..., keep_curve: _Optional[_Union[KeepCurve, _Mapping]] = ..., curve_stored: _Optional[_Union[LedgerStored, _Mapping]] = ..., node_leaves: _Optional[_Union[NodeLeaves, _Mapping]] = ..., stacks: _Optional[_Union[_stacks_pb2.StacksRequest, _Mapping]] = ...) -> None: ...

class SpawnRequest(_message.Message):
    __slots__ = ("worker", "socket_path", "log_path", "argv", "environment", "classic", "module", "torchrun")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    LOG_PATH_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    CLASSIC_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    TORCHRUN_FIELD_NUMBER: _ClassVar[int]
    worker: str
    socket_path: str
    log_path: str
    argv: _containers.RepeatedScalarFieldContainer[str]
    environment: _containers.ScalarMap[str, str]
    classic: bool
    module: bool
    torchrun: Torchrun
    def __init__(self, worker: _Optional[str] = ..., socket_path: _Optional[str] = ..., log_path: _Optional[str] = ..., argv: _Optional[_Iterable[str]] = ..., environment: _Optional[_Mapping[str, str]] = ..., classic: bool = ..., module: bool = ..., torchrun: _Optional[_Union[Torchrun, _Mapping]] = ...) -> None: ...

class Torchrun(_message.Message):
    __slots__ = ("run_id", "role", "signals", "log_dir", "streams", "prefix", "stdout_filters", "stderr_filters", "master_addr", "master_port", "virtual_local_rank", "executes", "program")
    class Streams(_message.Message):
        __slots__ = ("to_files", "to_console", "hidden")
        TO_FILES_FIELD_NUMBER: _ClassVar[int]
        TO_CONSOLE_FIELD_NUMBER: _ClassVar[int]
        HIDDEN_FIELD_NUMBER: _ClassVar[int]
        to_files: int
        to_console: int
        hidden: bool
        def __init__(self, to_files: _Optional[int] = ..., to_console: _Optional[int] = ..., hidden: bool = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    LOG_DIR_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FILTERS_FIELD_NUMBER: _ClassVar[int]
    STDERR_FILTERS_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDR_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    EXECUTES_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    role: str
    signals: str
    log_dir: str
    streams: _containers.RepeatedCompositeFieldContainer[Torchrun.Streams]
    prefix: str
    stdout_filters: _containers.RepeatedScalarFieldContainer[str]
    stderr_filters: _containers.RepeatedScalarFieldContainer[str]
    master_addr: str
    master_port: int
    virtual_local_rank: bool
    executes: bool
    program: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., role: _Optional[str] = ..., signals: _Optional[str] = ..., log_dir: _Optional[str] = ..., streams: _Optional[_Iterable[_Union[Torchrun.Streams, _Mapping]]] = ..., prefix: _Optional[str] = ..., stdout_filters: _Optional[_Iterable[str]] = ..., stderr_filters: _Optional[_Iterable[str]] = ..., master_addr: _Optional[str] = ..., master_port: _Optional[int] = ..., virtual_local_rank: bool = ..., executes: bool = ..., program: _Optional[_Iterable[str]] = ...) -> None: ...

class KillRequest(_message.Message):
    __slots__ = ("worker", "signal")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    worker: str
    signal: int
    def __init__(self, worker: _Optional[str] = ..., signal: _Optional[int] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ZygoteRequest(_message.Message):
    __slots__ = ("spawn", "kill", "end", "attach")
    SPAWN_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    spawn: SpawnRequest
    kill: KillRequest
    end: EndRequest
    attach: AttachRequest
    def __init__(self, spawn: _Optional[_Union[SpawnRequest, _Mapping]] = ..., kill: _Optional[_Union[KillRequest, _Mapping]] = ..., end: _Optional[_Union[EndRequest, _Mapping]] = ..., attach: _Optional[_Union[AttachRequest, _Mapping]] = ...) -> None: ...

class Spawned(_message.Message):
    __slots__ = ("worker", "pid", "log_path", "output")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LOG_PATH_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    pid: int
    log_path: str
    output: str
    def __init__(self, worker: _Optional[str] = ..., pid: _Optional[int] = ..., log_path: _Optional[str] = ..., output: _Optional[str] = ...) -> None: ...

class NotSpawned(_message.Message):
    __slots__ = ("worker", "reason")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker: str
    reason: str
    def __init__(self, worker: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Exited(_message.Message):
    __slots__ = ("worker", "pid", "exit_code", "signal")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    worker: str
    pid: int
    exit_code: int
    signal: int
    def __init__(self, worker: _Optional[str] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ...) -> None: ...

class ZygoteReady(_message.Message):
    __slots__ = ("workers", "keeper")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    KEEPER_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Spawned]
    keeper: int
    def __init__(self, workers: _Optional[_Iterable[_Union[Spawned, _Mapping]]] = ..., keeper: _Optional[int] = ...) -> None: ...

class ZygoteEvent(_message.Message):
    __slots__ = ("ready", "spawned", "exited", "not_spawned", "notice")
    READY_FIELD_NUMBER: _ClassVar[int]
    SPAWNED_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    NOT_SPAWNED_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    ready: ZygoteReady
    spawned: Spawned
    exited: Exited
    not_spawned: NotSpawned
    notice: Notice
    def __init__(self, ready: _Optional[_Union[ZygoteReady, _Mapping]] = ..., spawned: _Optional[_Union[Spawned, _Mapping]] = ..., exited: _Optional[_Union[Exited, _Mapping]] = ..., not_spawned: _Optional[_Union[NotSpawned, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ...) -> None: ...
