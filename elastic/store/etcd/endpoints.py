"""Parses etcd's endpoints as an operator writes them, and holds the options for the connection."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from elastic.errors import ConfigurationError
from elastic.settings.tls_files import TlsFiles

DEFAULT_PORT = 2379
_TLS_BY_SCHEME = {"http": False, "https": True}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One member's client address."""

    host: str
    port: int
    tls: bool

    @property
    def target(self) -> str:
        """HOST:PORT, as gRPC wants it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.target}"


def parse_endpoints(text: str, *, tls_by_default: bool = False) -> tuple[Endpoint, ...]:
    """Parse "http://h:p,https://h:p" or "h:p,h:p"; `tls_by_default` applies without a scheme.

    Raises ConfigurationError.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigurationError(
            f"no etcd endpoint in {text!r}; write them like http://host1:2379,http://host2:2379"
        )
    return tuple(dict.fromkeys(_parse(part, tls_by_default) for part in parts))


def _parse(text: str, tls_by_default: bool) -> Endpoint:
    scheme, separator, address = text.rpartition("://")
    if separator and scheme not in _TLS_BY_SCHEME:
        raise ConfigurationError(
            f"etcd endpoint {text!r}: unknown scheme {scheme!r}; use http or https"
        )
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _not_an_address(text, str(error)) from error
    if not host or parts.path.strip("/") or parts.query or parts.username is not None:
        raise _not_an_address(text, "expected HOST:PORT")
    return Endpoint(
        host=host,
        port=DEFAULT_PORT if port is None else port,
        tls=_TLS_BY_SCHEME.get(scheme, tls_by_default),
    )


def _not_an_address(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"etcd endpoint {text!r}: {why}; write it like http://host:2379")


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdOptions:
    """How to reach a cluster. Raises ConfigurationError for options that contradict each other."""

    endpoints: tuple[Endpoint, ...]
    tls: TlsFiles | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    namespace: str = ""
    """The prefix of every key, for a user with the right to write below one prefix only."""
    attempt_timeout_s: float = 1.0
    """The time for one member's answer; after it the next one is asked."""
    total_timeout_s: float = 10.0
    """The time for a call with all its attempts."""
    watch_idle_s: float = 1.0
    """After this time without a message, a watch asks whether the member is still there."""
    spread: bool = True
    """Ask a random endpoint first, not the first one, so that clients spread over the members."""

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password is None):
            raise ConfigurationError("an etcd user needs a password, and a password needs a user")
        if self.tls is not None and not any(endpoint.tls for endpoint in self.endpoints):
            raise ConfigurationError(
                "certificates for etcd are configured, but no endpoint starts with https://: "
                + ", ".join(map(str, self.endpoints))
            )
        if self.tls is not None and (self.tls.certificate is None) != (self.tls.key is None):
            raise ConfigurationError(
                "an etcd client certificate needs its key, and a key needs its certificate"
            )


def etcd_options(
    endpoints: str,
    *,
    ca: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    user: str | None = None,
    password: str | None = None,
    namespace: str = "",
) -> EtcdOptions:
    """Options from an operator's settings; endpoints without a scheme use TLS if a file is given.

    Raises ConfigurationError.
    """
    tls = (
        None
        if ca is certificate is key is None
        else TlsFiles(ca=ca, certificate=certificate, key=key)
    )
    return EtcdOptions(
        endpoints=parse_endpoints(endpoints, tls_by_default=tls is not None),
        tls=tls,
        user=user,
        password=password,
        namespace=namespace,
    )
