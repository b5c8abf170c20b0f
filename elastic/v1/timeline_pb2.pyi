from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stretch(_message.Message):
    __slots__ = ("what", "generation", "step", "began_unix_s", "lasted_s", "data_s", "calls_s", "saves_s", "join_s", "sync_s")
    class What(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WHAT_UNSPECIFIED: _ClassVar[Stretch.What]
        WHAT_STEP: _ClassVar[Stretch.What]
        WHAT_GIVEN_UP: _ClassVar[Stretch.What]
        WHAT_REGROUP: _ClassVar[Stretch.What]
    WHAT_UNSPECIFIED: Stretch.What
    WHAT_STEP: Stretch.What
    WHAT_GIVEN_UP: Stretch.What
    WHAT_REGROUP: Stretch.What
    WHAT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LASTED_S_FIELD_NUMBER: _ClassVar[int]
    DATA_S_FIELD_NUMBER: _ClassVar[int]
    CALLS_S_FIELD_NUMBER: _ClassVar[int]
    SAVES_S_FIELD_NUMBER: _ClassVar[int]
    JOIN_S_FIELD_NUMBER: _ClassVar[int]
    SYNC_S_FIELD_NUMBER: _ClassVar[int]
    what: Stretch.What
    generation: int
    step: int
    began_unix_s: float
    lasted_s: float
    data_s: float
    calls_s: float
    saves_s: float
    join_s: float
    sync_s: float
    def __init__(self, what: _Optional[_Union[Stretch.What, str]] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., began_unix_s: _Optional[float] = ..., lasted_s: _Optional[float] = ..., data_s: _Optional[float] = ..., calls_s: _Optional[float] = ..., saves_s: _Optional[float] = ..., join_s: _Optional[float] = ..., sync_s: _Optional[float] = ...) -> None: ...

class SlotPeriod(_message.Message):
    __slots__ = ("node", "slot", "worker", "kind", "began_unix_s", "ended_unix_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    slot: int
    worker: str
    kind: str
    began_unix_s: float
    ended_unix_s: float
    def __init__(self, node: _Optional[str] = ..., slot: _Optional[int] = ..., worker: _Optional[str] = ..., kind: _Optional[str] = ..., began_unix_s: _Optional[float] = ..., ended_unix_s: _Optional[float] = ...) -> None: ...

class RankStretches(_message.Message):
    __slots__ = ("node", "worker", "stretches")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    STRETCHES_FIELD_NUMBER: _ClassVar[int]
    node: str
    worker: str
    stretches: _containers.RepeatedCompositeFieldContainer[Stretch]
    def __init__(self, node: _Optional[str] = ..., worker: _Optional[str] = ..., stretches: _Optional[_Iterable[_Union[Stretch, _Mapping]]] = ...) -> None: ...

class GetTimelineRequest(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    def __init__(self, steps: _Optional[int] = ...) -> None: ...

class JobTimeline(_message.Message):
    __slots__ = ("ranks", "periods", "silent")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PERIODS_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankStretches]
    periods: _containers.RepeatedCompositeFieldContainer[SlotPeriod]
    silent: int
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankStretches, _Mapping]]] = ..., periods: _Optional[_Iterable[_Union[SlotPeriod, _Mapping]]] = ..., silent: _Optional[int] = ...) -> None: ...
