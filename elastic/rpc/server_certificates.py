"""The server's credentials, which look at the files again for each new connection."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from elastic.rpc.certificates import OwnCertificate, Role
from elastic.rpc.newest_certificate import NewestCertificate
from elastic.rpc.security import Report, Tls


def server_credentials(tls: Tls, report: Report) -> grpc.ServerCredentials:
    """For a port; clients must show a certificate of the authority. Connections stay as they are.

    To be called on the event loop, on which reports are made too. Raises ConfigurationError.
    """
    newest = NewestCertificate(tls, Role.SERVER, _on_this_loop(report))
    used = newest.get()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """What gRPC asks at each handshake, on a thread of its own; None: as before."""
        nonlocal used
        if (found := newest.get()) is used:
            return None
        used = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), newer, require_client_authentication=True
    )


def _on_this_loop(report: Report) -> Report:
    loop = asyncio.get_running_loop()

    def from_anywhere(name: str, /, **fields: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is going
            loop.call_soon_threadsafe(lambda: report(name, **fields))

    return from_anywhere


def _configuration(certificate: OwnCertificate) -> grpc.ServerCertificateConfiguration:
    contents = certificate.contents
    return grpc.ssl_server_certificate_configuration(
        [(contents.key, contents.certificate)], root_certificates=contents.ca
    )
