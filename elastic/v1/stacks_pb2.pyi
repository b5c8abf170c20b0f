from elastic.v1 import timeline_pb2 as _timeline_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Place(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACE_UNSPECIFIED: _ClassVar[Place]
    PLACE_STARTING: _ClassVar[Place]
    PLACE_JOINING: _ClassVar[Place]
    PLACE_BOUNDARY: _ClassVar[Place]
    PLACE_BETWEEN: _ClassVar[Place]
    PLACE_DATA: _ClassVar[Place]
    PLACE_FORWARD: _ClassVar[Place]
    PLACE_BACKWARD: _ClassVar[Place]
    PLACE_OPTIMIZER: _ClassVar[Place]
    PLACE_COMMIT: _ClassVar[Place]
    PLACE_MEETING: _ClassVar[Place]
    PLACE_RUN: _ClassVar[Place]
    PLACE_SAVING: _ClassVar[Place]

class Answer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ANSWER_UNSPECIFIED: _ClassVar[Answer]
    ANSWER_GIVEN: _ClassVar[Answer]
    ANSWER_SIGNALLED: _ClassVar[Answer]
    ANSWER_STOPPED: _ClassVar[Answer]
    ANSWER_NONE: _ClassVar[Answer]
    ANSWER_ABSENT: _ClassVar[Answer]
PLACE_UNSPECIFIED: Place
PLACE_STARTING: Place
PLACE_JOINING: Place
PLACE_BOUNDARY: Place
PLACE_BETWEEN: Place
PLACE_DATA: Place
PLACE_FORWARD: Place
PLACE_BACKWARD: Place
PLACE_OPTIMIZER: Place
PLACE_COMMIT: Place
PLACE_MEETING: Place
PLACE_RUN: Place
PLACE_SAVING: Place
ANSWER_UNSPECIFIED: Answer
ANSWER_GIVEN: Answer
ANSWER_SIGNALLED: Answer
ANSWER_STOPPED: Answer
ANSWER_NONE: Answer
ANSWER_ABSENT: Answer

class Frame(_message.Message):
    __slots__ = ("file", "line", "function")
    FILE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    file: str
    line: int
    function: str
    def __init__(self, file: _Optional[str] = ..., line: _Optional[int] = ..., function: _Optional[str] = ...) -> None: ...

class ThreadStack(_message.Message):
    __slots__ = ("name", "frames", "left_out")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    left_out: int
    def __init__(self, name: _Optional[str] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class ProcessStacks(_message.Message):
    __slots__ = ("pid", "name", "threads")
    PID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    name: str
    threads: _containers.RepeatedCompositeFieldContainer[ThreadStack]
    def __init__(self, pid: _Optional[int] = ..., name: _Optional[str] = ..., threads: _Optional[_Iterable[_Union[ThreadStack, _Mapping]]] = ...) -> None: ...

class WorkerStacks(_message.Message):
    __slots__ = ("worker", "request", "answer", "place", "place_s", "committed", "generation", "collectives", "processes", "stretches", "log")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PLACE_S_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    STRETCHES_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    worker: str
    request: int
    answer: Answer
    place: Place
    place_s: float
    committed: int
    generation: int
    collectives: int
    processes: _containers.RepeatedCompositeFieldContainer[ProcessStacks]
    stretches: _containers.RepeatedCompositeFieldContainer[_timeline_pb2.Stretch]
    log: str
    def __init__(self, worker: _Optional[str] = ..., request: _Optional[int] = ..., answer: _Optional[_Union[Answer, str]] = ..., place: _Optional[_Union[Place, str]] = ..., place_s: _Optional[float] = ..., committed: _Optional[int] = ..., generation: _Optional[int] = ..., collectives: _Optional[int] = ..., processes: _Optional[_Iterable[_Union[ProcessStacks, _Mapping]]] = ..., stretches: _Optional[_Iterable[_Union[_timeline_pb2.Stretch, _Mapping]]] = ..., log: _Optional[str] = ...) -> None: ...

class StacksRequest(_message.Message):
    __slots__ = ("request", "worker", "brief", "stretches", "log")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BRIEF_FIELD_NUMBER: _ClassVar[int]
    STRETCHES_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    request: int
    worker: str
    brief: bool
    stretches: int
    log: bool
    def __init__(self, request: _Optional[int] = ..., worker: _Optional[str] = ..., brief: bool = ..., stretches: _Optional[int] = ..., log: bool = ...) -> None: ...

class NodeStacks(_message.Message):
    __slots__ = ("request", "workers")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    request: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStacks]
    def __init__(self, request: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStacks, _Mapping]]] = ...) -> None: ...

class GetStacksRequest(_message.Message):
    __slots__ = ("of",)
    OF_FIELD_NUMBER: _ClassVar[int]
    of: str
    def __init__(self, of: _Optional[str] = ...) -> None: ...

class RankStacks(_message.Message):
    __slots__ = ("rank", "node", "stacks", "is_member")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    IS_MEMBER_FIELD_NUMBER: _ClassVar[int]
    rank: int
    node: str
    stacks: WorkerStacks
    is_member: bool
    def __init__(self, rank: _Optional[int] = ..., node: _Optional[str] = ..., stacks: _Optional[_Union[WorkerStacks, _Mapping]] = ..., is_member: bool = ...) -> None: ...

class JobStacks(_message.Message):
    __slots__ = ("ranks", "verdict")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankStacks]
    verdict: str
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankStacks, _Mapping]]] = ..., verdict: _Optional[str] = ...) -> None: ...
