"""The server's credentials, which look at the files again for each new connection."""

from __future__ import annotations

import grpc

from elastic.rpc.certificates import OwnCertificate, Role
from elastic.rpc.newest_certificate import NewestCertificate
from elastic.rpc.security import Report, Tls, on_this_loop


def server_credentials(tls: Tls, report: Report) -> grpc.ServerCredentials:
    """For a port; clients must show a certificate of the authority. Connections stay as they are.

    To be called on the event loop, on which reports are made too. Raises ConfigurationError.
    """
    newest = NewestCertificate(tls, Role.SERVER, on_this_loop(report))
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


def _configuration(certificate: OwnCertificate) -> grpc.ServerCertificateConfiguration:
    contents = certificate.contents
    return grpc.ssl_server_certificate_configuration(
        [(contents.key, contents.certificate)], root_certificates=contents.ca
    )
