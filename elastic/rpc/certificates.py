"""Loads this process's own certificate and checks whether a peer can accept it.

The standard library decodes only certificates that it has verified. So this module shows the
certificate to itself, in a handshake in memory in which it is its own authority and time is not
checked.
"""

from __future__ import annotations

import enum
import os
import ssl
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.errors import ConfigurationError
from elastic.rpc.identity import JobRole, job_identity, role_identity, roles_named, unknown_roles
from elastic.settings.tls_files import TlsContents, TlsFiles, read_tls_files, usable_tls_files

WHOSE = "TLS"
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which `ssl` does not name
_MOST_ROUND_TRIPS = 10


class Role(enum.Enum):
    """The end of a connection at which a certificate is shown."""

    SERVER = "server"
    CLIENT = "client"


_REPLACE = "replace it with one for both serverAuth and clientAuth"
_ADVICE = {
    Role.SERVER: (
        "certificates limited to the role agent, operator or viewer are for clients only; "
        f"{_REPLACE}, or serve HTTP only at an address on 127.0.0.1"
    ),
    Role.CLIENT: _REPLACE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCertificate:
    """A certificate that has passed all checks; times in Unix seconds."""

    contents: TlsContents
    dns_names: tuple[str, ...]
    not_before_s: float
    not_after_s: float


def load_certificate(
    files: TlsFiles, job: str, role: Role, *, coordinates: bool | None = None
) -> OwnCertificate:
    """Load the certificate of `files`, which must be valid now and belong to `job`.

    coordinates: it must also be good for the job's coordinator; None: only a server's must be.
    Raises ConfigurationError that names the file, what is wrong and what to do.
    """
    assert files.ca is not None, "mutual TLS needs an authority"
    assert files.certificate is not None, "and a certificate"
    contents = usable_tls_files(files, WHOSE)
    decoded = _decoded(files, role)
    if read_tls_files(files, WHOSE) != contents:
        raise ConfigurationError(
            f"the certificate {files.certificate} is being replaced; try again"
        )
    certificate = OwnCertificate(
        contents=contents,
        dns_names=tuple(name for kind, name in decoded.get("subjectAltName", ()) if kind == "DNS"),
        not_before_s=ssl.cert_time_to_seconds(decoded["notBefore"]),
        not_after_s=ssl.cert_time_to_seconds(decoded["notAfter"]),
    )
    _check_time(files.certificate, certificate)
    _check_job(files.certificate, certificate, job)
    if role is Role.SERVER if coordinates is None else coordinates:
        _check_coordinator(files.certificate, certificate, job)
    return certificate


def readable_by_others(key: Path) -> bool:
    """Whether others than its owner may read or write the key.

    If root owns the key and this process is not root, its group may read it: so a pod reads a
    Secret.
    """
    found = key.stat()
    others = 0o037 if found.st_uid == 0 != os.geteuid() else 0o077
    return bool(stat.S_IMODE(found.st_mode) & others)


def at(unix_s: float) -> str:
    """The time as text, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


def verification_problem(files: TlsFiles, role: Role) -> str:
    """Why the authority of `files` does not verify the certificate; empty: no problem found."""
    assert files.ca is not None
    try:
        _handshake_with_itself(files, role, trusted=files.ca, flags=0)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (OSError, ValueError):
        return ""  # the files are being replaced
    return ""


def _check_time(path: Path, certificate: OwnCertificate) -> None:
    now_s = time.time()
    if now_s >= certificate.not_after_s:
        raise ConfigurationError(
            f"the certificate {path} expired at {at(certificate.not_after_s)}; it is now "
            f"{at(now_s)}; replace it, or set the clock"
        )
    if now_s < certificate.not_before_s:
        raise ConfigurationError(
            f"the certificate {path} is not valid before {at(certificate.not_before_s)}; it is "
            f"now {at(now_s)}; replace it, or set the clock"
        )


def _check_job(path: Path, certificate: OwnCertificate, job: str) -> None:
    expected = job_identity(job)
    if expected not in map(str.lower, certificate.dns_names):
        names = ", ".join(certificate.dns_names) or "no DNS name"
        raise ConfigurationError(
            f"the certificate {path} is not for job {job!r}: it names {names}; expected "
            f"{expected} among its subjectAltName entries (a wildcard does not count)"
        )
    if unknown := unknown_roles(certificate.dns_names, job):
        known = ", ".join(role.value for role in JobRole)
        raise ConfigurationError(
            f"the certificate {path} names {', '.join(unknown)}, but the roles are {known}; issue "
            "it again with one of them"
        )


def _check_coordinator(path: Path, certificate: OwnCertificate, job: str) -> None:
    roles = roles_named(certificate.dns_names, job)
    if roles is not None and JobRole.COORDINATOR not in roles:
        raise ConfigurationError(
            f"the certificate {path} is limited to roles other than coordinator: it names "
            f"{', '.join(certificate.dns_names)}; expected "
            f"{role_identity(job, JobRole.COORDINATOR)} among its subjectAltName entries"
        )


def _decoded(files: TlsFiles, role: Role) -> dict[str, Any]:
    assert files.certificate is not None
    try:
        flags = ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
        return _handshake_with_itself(files, role, trusted=files.certificate, flags=flags)
    except OSError as error:  # includes ssl.SSLError
        why = getattr(error, "verify_message", "") or str(error)
        raise ConfigurationError(
            f"the certificate {files.certificate} cannot be used as a {role.value}'s: {why}; "
            f"{_ADVICE[role]}"
        ) from error


def _handshake_with_itself(
    files: TlsFiles, role: Role, *, trusted: Path, flags: int
) -> dict[str, Any]:
    """Decode the certificate by a handshake whose peer trusts `trusted`; raises ssl.SSLError."""
    assert files.certificate is not None
    contexts = {}
    for end in Role:
        protocol = ssl.PROTOCOL_TLS_CLIENT if end is Role.CLIENT else ssl.PROTOCOL_TLS_SERVER
        context = contexts[end] = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.load_cert_chain(files.certificate, files.key)
        if end is role:
            context.verify_mode = ssl.CERT_NONE
        else:
            context.load_verify_locations(cafile=trusted)
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= flags
    ends = _handshake(contexts[Role.CLIENT], contexts[Role.SERVER])
    return dict(ends[Role.SERVER if role is Role.CLIENT else Role.CLIENT].getpeercert() or {})


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[Role, ssl.SSLObject]:
    """Connect both ends in memory and return them; raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = {
        Role.CLIENT: client.wrap_bio(to_client, to_server),
        Role.SERVER: server.wrap_bio(to_server, to_client, server_side=True),
    }
    waiting = set(ends)
    for _ in range(_MOST_ROUND_TRIPS):
        waiting = {end for end in Role if end in waiting and not _proceeds(ends[end])}
        if not waiting:
            return ends
    raise AssertionError("a handshake in memory does not end")


def _proceeds(end: ssl.SSLObject) -> bool:
    """Do the next part of the handshake; True if this end has finished."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
