"""Defines the settings that protect the connections of a job, shared by every command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from elastic.settings.fields import Naming, Relation, flag_of, setting
from elastic.settings.limits import PEM_FILE, YES_OR_NO

_FILES = ("tls_ca", "tls_cert", "tls_key")


def _fits_together(values: Mapping[str, Any], naming: Naming) -> Iterator[str]:
    return security_problems(SecuritySettings(**values), naming.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class SecuritySettings:
    """Mutual TLS with three files, or plain text; `security_problems` checks the combination."""

    relations: ClassVar[tuple[Relation, ...]] = (Relation((*_FILES, "insecure"), _fits_together),)

    tls_ca: Path | None = setting(
        None, "PEM file of the authorities that sign the certificates of the job.", PEM_FILE
    )
    tls_cert: Path | None = setting(
        None, "PEM file of the certificate to show, which must name JOB.job.elastic.", PEM_FILE
    )
    tls_key: Path | None = setting(None, "PEM file of its key, without a passphrase.", PEM_FILE)
    insecure: bool = setting(
        False,
        "Allow plain text beyond this machine: anyone who reaches the port controls the job.",
        YES_OR_NO,
    )


def security_problems(
    settings: SecuritySettings, name: Callable[[str], str] = flag_of
) -> Iterator[str]:
    """Yield a line for each conflict; `name` returns a setting as users spell it."""
    missing = [one for one in _FILES if getattr(settings, one) is None]
    given = ", ".join(name(one) for one in _FILES if one not in missing)
    if given and missing:
        yield f"{given}: mutual TLS also needs {', '.join(map(name, missing))}"
    if given and settings.insecure:
        yield f"{given} and {name('insecure')} cannot be used together; remove one"
