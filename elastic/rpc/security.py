"""Chooses mutual TLS or plain text for gRPC, and enforces where plain text is allowed."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elastic.errors import ConfigurationError
from elastic.rpc.certificates import OwnCertificate, readable_by_others
from elastic.settings.security import SecuritySettings, security_problems
from elastic.settings.tls_files import TlsFiles

_UNIX = "unix:"


class Report(Protocol):
    """Takes an event with its fields, as `Journal.record` does."""

    def __call__(self, name: str, /, **fields: Any) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Plaintext:
    """No encryption and no identity; `insecure`: allowed to other machines too."""

    insecure: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Both ends show a certificate of `job`; new connections use replaced files."""

    job: str
    files: TlsFiles
    kept: dict[Any, OwnCertificate] = field(default_factory=dict, compare=False, repr=False)
    """The certificate loaded last for each use; it stays in use if its files become unusable."""


Security = Plaintext | Tls
PLAINTEXT = Plaintext()


def choose_security(job: str, settings: SecuritySettings) -> Security:
    """The security that the settings ask for; raises ConfigurationError if they contradict."""
    if problems := list(security_problems(settings)):
        raise ConfigurationError("\n".join(problems))
    if settings.tls_ca is None:
        return Plaintext(insecure=settings.insecure)
    files = TlsFiles(ca=settings.tls_ca, certificate=settings.tls_cert, key=settings.tls_key)
    return Tls(job=job, files=files)


def trusting(security: Security) -> Security:
    """The same, with plain text to other machines allowed, of which `require_protection` warns."""
    return replace(security, insecure=True) if isinstance(security, Plaintext) else security


def require_protection(address: str, security: Security, report: Report) -> None:
    """Refuse plain text to other machines, with ConfigurationError, unless it was asked for.

    Report a warning if it was, and for a key that others can read.
    """
    if isinstance(security, Tls):
        _warn_of_key(security, report)
        return
    if stays_here(address):
        return
    if not security.insecure:
        raise ConfigurationError(
            f"{address} can be reached from other machines, and there is no certificate: anyone "
            "who reaches the port would control the job; give --tls-ca, --tls-cert and --tls-key, "
            "or --insecure on a network where you trust everyone"
        )
    report(
        "security_warning",
        message=f"{address} is used in plain text, without certificates, so the network must be "
        "trusted: anyone who reaches it controls the job, and anyone on the path reads the traffic",
    )


def stays_here(address: str) -> bool:
    """Whether the address is only on this machine: a Unix socket, or a loopback address."""
    if is_unix_socket(address):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name can mean any machine, and another one tomorrow


def is_unix_socket(address: str) -> bool:
    """Whether the address is "unix:/path"."""
    return address.startswith(_UNIX)


def _warn_of_key(tls: Tls, report: Report) -> None:
    key = tls.files.key
    assert key is not None
    try:
        exposed = readable_by_others(key)
    except OSError:
        return  # the code that needs the file reports the error
    if exposed:
        report(
            "security_warning", message=f"other users can read the key {key}; run chmod 600 {key}"
        )


def log_report(name: str, /, **fields: Any) -> None:
    """A Report for callers without a journal."""
    text = ", ".join(f"{key}={value}" for key, value in fields.items())
    logging.getLogger("elastic").warning("%s: %s", name, text)


def no_report(name: str, /, **fields: Any) -> None:
    """A Report that drops the event."""
    del name, fields


def on_this_loop(report: Report) -> Report:
    """The same report, callable from any thread. Call this on the loop that the report needs."""
    loop = asyncio.get_running_loop()

    def from_anywhere(name: str, /, **fields: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is going
            loop.call_soon_threadsafe(lambda: report(name, **fields))

    return from_anywhere
