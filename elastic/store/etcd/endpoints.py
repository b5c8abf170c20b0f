"""Where etcd listens, as an operator writes it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from elastic.errors import ConfigurationError

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
    """From "http://h:p,https://h:p" or "h:p,h:p"; `tls_by_default` is for those without a scheme.

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
