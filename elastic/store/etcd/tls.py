"""Certificates for etcd from files, looked at again before a new connection."""

from __future__ import annotations

from pathlib import Path

import grpc

from elastic.settings.tls_files import TlsFiles, usable_tls_files

Fingerprint = tuple[tuple[int, int, int] | None, ...]


def credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """For a channel; raises ConfigurationError naming the file that cannot be used."""
    contents = usable_tls_files(files, "etcd")
    return grpc.ssl_channel_credentials(
        root_certificates=contents.ca,
        private_key=contents.key,
        certificate_chain=contents.certificate,
    )


def fingerprint(files: TlsFiles) -> Fingerprint:
    """Differs when a file was replaced."""
    return tuple(_stamp(path) for path in (files.ca, files.certificate, files.key))


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ino, status.st_size) if status is not None else None
