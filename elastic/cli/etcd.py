"""Opens etcd for commands, and finds the addresses and names that nodes register there."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
from pathlib import Path

from elastic.runtime import network
from elastic.settings.security import SecuritySettings
from elastic.settings.store import StoreSettings, etcd_password
from elastic.store.etcd.endpoints import EtcdOptions, etcd_options, parse_endpoints
from elastic.store.etcd.store import EtcdStore


def open_store(
    settings: StoreSettings, *, security: SecuritySettings, total_timeout_s: float | None = None
) -> EtcdStore:
    """total_timeout_s: seconds for all attempts of a call together; None: the store's default.

    Raises ConfigurationError.
    """
    options = options_of_store(settings, security)
    if total_timeout_s is not None:
        options = dataclasses.replace(options, total_timeout_s=total_timeout_s)
    return EtcdStore(options)


def options_of_store(settings: StoreSettings, security: SecuritySettings) -> EtcdOptions:
    """How to reach etcd. With https, the job's TLS files are used if etcd's own are not set.

    Raises ConfigurationError.
    """
    files = (settings.etcd_ca, settings.etcd_cert, settings.etcd_key)
    if not any(files) and any(one.startswith("https://") for one in settings.etcd):
        files = (security.tls_ca, security.tls_cert, security.tls_key)
    ca, certificate, key = files
    return etcd_options(
        ",".join(settings.etcd),
        ca=ca,
        certificate=certificate,
        key=key,
        user=settings.etcd_user,
        password=etcd_password(settings),
    )


def address_towards(settings: StoreSettings) -> str:
    """This machine's address on the route to etcd, which other nodes can probably reach too."""
    for endpoint in parse_endpoints(",".join(settings.etcd), tls_by_default=False):
        with contextlib.suppress(OSError):
            return address_on_route(endpoint.host, endpoint.port)
    return socket.gethostname()


def address_on_route(host: str, port: int) -> str:
    """This machine's address on the route to `host`, which other nodes can probably reach too.
    Raises OSError."""
    found = network.address_towards(host, port)
    # A machine may resolve its own name to loopback (on Debian to 127.0.1.1), which others cannot
    # reach. A loopback address that users give is intended, and kept.
    own_name = _is_loopback(found) and not _is_loopback(host)
    return network.reachable_address() if own_name else found


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name() -> str:
    """The first label of this machine's name in lower case, as node names allow it."""
    return Path(socket.gethostname()).name.partition(".")[0].lower()
