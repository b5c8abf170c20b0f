"""Provides the newest usable certificate, and server credentials that use it for each new
connection. Files that cannot be used are reported, and the certificate before them stays in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import grpc

from elastic.errors import ConfigurationError
from elastic.rpc.certificates import OwnCertificate, Role, at, load_certificate
from elastic.rpc.security import Report, Tls, on_this_loop
from elastic.settings.tls_files import read_tls_files


class NewestCertificate:
    """Reads the files at each `get`, on any thread; `report` is called on that thread."""

    def __init__(
        self, tls: Tls, role: Role, report: Report, *, coordinates: bool | None = None
    ) -> None:
        """coordinates: it must be good for the coordinator; None: only a server's must be."""
        self._tls = tls
        self._role = role
        self._coordinates = coordinates
        self._report = report
        self._lock = threading.Lock()
        self._current: OwnCertificate | None = None
        self._reported: object = None  # the state of the files that was reported as bad

    def get(self) -> OwnCertificate:
        """The newest usable certificate: the same object until the files hold another usable one.

        Raises ConfigurationError until there is a usable one.
        """
        with self._lock:
            return self._get()

    @property
    def path(self) -> str:
        return str(self._tls.files.certificate)

    @property
    def expires_unix_s(self) -> float | None:
        """When the certificate in use expires; None while there is none."""
        current = self._current
        return current.not_after_s if current is not None else None

    def _get(self) -> OwnCertificate:
        state: object = None
        key = (self._role, self._coordinates)
        try:
            state = read_tls_files(self._tls.files, "TLS")
            if self._current is not None and state == self._current.contents:
                self._look_at_expiry(self._current)
                return self._current
            tls = self._tls
            found = load_certificate(tls.files, tls.job, self._role, coordinates=self._coordinates)
        except ConfigurationError as error:
            self._current = self._current or self._tls.kept.get(key)
            if self._current is None:
                raise
            self._complain(state or str(error), f"{error}; the previous certificate stays in use")
            return self._current
        if self._current is not None:
            path, expires = str(self._tls.files.certificate), at(found.not_after_s)
            self._report("certificates_reloaded", certificate=path, expires=expires)
        self._current, self._reported = found, None
        self._tls.kept[key] = found
        return found

    def _look_at_expiry(self, current: OwnCertificate) -> None:
        if time.time() >= current.not_after_s:
            self._complain(
                current.contents,
                f"the certificate {self._tls.files.certificate} expired at "
                f"{at(current.not_after_s)}; replace it: no restart is needed",
            )

    def _complain(self, state: object, reason: str) -> None:
        """Report once for each state of the files: connections are tried often."""
        if state != self._reported:
            self._reported = state
            self._report("certificates_refused", reason=reason)


WARN_BEFORE_S = (14 * 86_400.0, 86_400.0)
_LOOK_EVERY_S = 60.0
"""The status and the metrics tell what was found at the last look, also of replaced files."""


async def warn_of_expiry(newest: NewestCertificate, report: Report) -> None:
    """Report twice that the certificate ends: so many seconds before it does. Never returns."""
    told: object = None
    while True:
        with contextlib.suppress(ConfigurationError):  # others report that it cannot be used
            expires_s = (await asyncio.to_thread(newest.get)).not_after_s
            left_s = expires_s - time.time()
            due = [before_s for before_s in WARN_BEFORE_S if left_s < before_s]
            if due and told != (expires_s, len(due)):
                told = expires_s, len(due)
                report(
                    "certificate_expires",
                    certificate=newest.path,
                    expires=at(expires_s),
                    left_s=round(max(0.0, left_s)),
                )
        await asyncio.sleep(_LOOK_EVERY_S)


def server_credentials(tls: Tls, report: Report) -> grpc.ServerCredentials:
    """Credentials for a port; clients must show a certificate of the authority. A new certificate
    does not change open connections.

    Call it on the event loop, where `report` is called too. Raises ConfigurationError.
    """
    newest = NewestCertificate(tls, Role.SERVER, on_this_loop(report))
    used = newest.get()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at each handshake, on gRPC's own thread; None: no change."""
        nonlocal used
        if (found := newest.get()) is used:
            return None
        used = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), newer, require_client_authentication=True
    )


def _configuration(certificate: OwnCertificate) -> grpc.ServerCertificateConfiguration:
    contents = certificate.contents
    return grpc.ssl_server_certificate_configuration(
        [(contents.key, contents.certificate)], root_certificates=contents.ca
    )
