"""What may be set about the way to etcd."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from elastic.errors import ConfigurationError
from elastic.settings.tls_files import TlsFiles
from elastic.store.etcd.endpoints import Endpoint, parse_endpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdOptions:
    """How to reach a cluster. Raises ConfigurationError for what does not fit together."""

    endpoints: tuple[Endpoint, ...]
    tls: TlsFiles | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    namespace: str = ""
    """Put before every key, for a user who may write below one prefix only."""
    attempt_timeout_s: float = 1.0
    """For one member's answer; then the next one is asked."""
    total_timeout_s: float = 10.0
    """For a call, all its attempts together."""
    watch_idle_s: float = 1.0
    """A watch that was told nothing for so long asks whether the member is still there."""
    spread: bool = True
    """Ask any endpoint first, not the first one, so that many clients spread over the members."""

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password is None):
            raise ConfigurationError("an etcd user needs a password, and a password a user")
        if self.tls is not None and not any(endpoint.tls for endpoint in self.endpoints):
            raise ConfigurationError(
                "certificates for etcd are configured, but no endpoint starts with https://: "
                + ", ".join(map(str, self.endpoints))
            )
        if self.tls is not None and (self.tls.certificate is None) != (self.tls.key is None):
            raise ConfigurationError("an etcd client certificate needs its key, and a key its one")


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
    """Options from what an operator writes; endpoints without a scheme use TLS if a file is given.

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
