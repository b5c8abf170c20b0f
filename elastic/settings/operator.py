"""What the operator commands (`elastic status` and others) can be told of the way to a job."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.settings import shared
from elastic.settings.fields import about, group
from elastic.settings.limits import DURATION
from elastic.settings.security import SecuritySettings
from elastic.settings.store import StoreSettings

_TIMEOUT_S = about("Seconds in which etcd and the coordinator must answer.", DURATION)


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectSettings:
    """Those of them with which a coordinator is asked whose address is known."""

    job: str = field(default="job", metadata=shared.JOB)
    timeout_s: float = field(default=10.0, metadata=_TIMEOUT_S)
    security: SecuritySettings = field(default_factory=SecuritySettings, metadata=group("TLS"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSettings:
    """Those of them that are about a job of this machine."""

    job: str = field(default="job", metadata=shared.JOB)
    timeout_s: float = field(default=10.0, metadata=_TIMEOUT_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSettings:
    """Validated settings of one operator command; `load_settings` builds it."""

    job: str = field(default="job", metadata=shared.JOB)
    timeout_s: float = field(default=10.0, metadata=_TIMEOUT_S)
    security: SecuritySettings = field(default_factory=SecuritySettings, metadata=group("TLS"))
    store: StoreSettings = field(metadata=group("etcd"))
