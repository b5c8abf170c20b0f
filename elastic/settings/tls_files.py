"""Reads and checks certificate files before anything uses them.

gRPC says little about files that it cannot use; the standard library says what is wrong.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from elastic.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """Paths of PEM files; None: not used (without `ca` the system's authorities are used)."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


class TlsContents(NamedTuple):
    """The contents of `TlsFiles`."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None


def read_tls_files(files: TlsFiles, whose: str) -> TlsContents:
    """Return the contents without a check.

    `whose` begins the error message, as in "etcd key x cannot be used". Raises ConfigurationError,
    which names the file that cannot be read.
    """
    return TlsContents(
        ca=_read(files.ca, f"{whose} authority"),
        certificate=_read(files.certificate, f"{whose} certificate"),
        key=_read(files.key, f"{whose} key"),
    )


def usable_tls_files(files: TlsFiles, whose: str) -> TlsContents:
    """Return contents that fit together. Raises ConfigurationError, which names the bad file."""
    contents = read_tls_files(files, whose)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if files.ca is not None:
            context.load_verify_locations(cafile=files.ca)
    except (OSError, ValueError) as error:
        raise _unusable(f"{whose} authority", files.ca, error) from error
    try:
        if files.certificate is not None:
            context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except (OSError, ValueError) as error:
        pair = f"{files.certificate}, {files.key}"
        raise _unusable(f"{whose} certificate and key", pair, error) from error
    if read_tls_files(files, whose) != contents:
        # The files changed meanwhile: the checked ones may not be those that were read.
        raise ConfigurationError(f"{whose} certificates are being replaced; try again")
    return contents


def _read(path: Path | None, what: str) -> bytes | None:
    try:
        return path.read_bytes() if path is not None else None
    except OSError as error:
        raise _unusable(what, path, error) from error


def _no_password() -> str:
    """Prevent the ssl module from asking for a passphrase on the terminal."""
    return ""


def _unusable(what: str, path: object, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{what} {path} cannot be used: {error}; expected PEM files that fit together, "
        "readable, the key without a passphrase"
    )
