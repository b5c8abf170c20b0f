"""Certificates from files, looked at again before a new connection."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from elastic.errors import ConfigurationError
from elastic.store.etcd.options import TlsFiles

Fingerprint = tuple[tuple[int, int, int] | None, ...]


def credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """For a channel; raises ConfigurationError naming the file that can not be used."""
    _check(files)
    return grpc.ssl_channel_credentials(
        root_certificates=_read(files.ca),
        private_key=_read(files.key),
        certificate_chain=_read(files.certificate),
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


def _check(files: TlsFiles) -> None:
    """gRPC says little about files it can not use; the standard library says what is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if files.ca is not None:
            context.load_verify_locations(cafile=files.ca)
    except (OSError, ValueError) as error:
        raise _unusable("authority", files.ca, error) from error
    try:
        if files.certificate is not None:
            context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except (OSError, ValueError) as error:
        raise _unusable(
            "certificate and key", f"{files.certificate}, {files.key}", error
        ) from error


def _no_password() -> str:
    """Instead of asking on the terminal."""
    return ""


def _unusable(what: str, path: object, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"etcd {what} {path} can not be used: {error}; expected PEM files that fit together, "
        "readable, the key without a passphrase"
    )


def _read(path: Path | None) -> bytes | None:
    return path.read_bytes() if path is not None else None
