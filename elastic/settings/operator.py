"""Defines how operator commands (`elastic status` and others) reach a job: their settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.settings import shared
from elastic.settings.fields import group, setting
from elastic.settings.limits import DURATION
from elastic.settings.security import SecuritySettings
from elastic.settings.store import StoreSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSettings:
    """The settings of an operator command for a job on this machine."""

    job: str = field(default="job", metadata=shared.JOB)
    timeout_s: float = setting(
        10.0, "Seconds in which etcd and the coordinator must answer.", DURATION
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectSettings(LocalSettings):
    """The settings of an operator command that is given the coordinator's address."""

    security: SecuritySettings = field(default_factory=SecuritySettings, metadata=group("TLS"))


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSettings(DirectSettings):
    """Validated settings of one operator command; `load_settings` builds it."""

    store: StoreSettings = field(metadata=group("etcd"))
