"""The store and the addresses of the commands that work with etcd."""

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
    """total_timeout_s: for a call, all attempts together; None: the store's own.

    Raises ConfigurationError.
    """
    options = options_of_store(settings, security)
    if total_timeout_s is not None:
        options = dataclasses.replace(options, total_timeout_s=total_timeout_s)
    return EtcdStore(options)


def options_of_store(settings: StoreSettings, security: SecuritySettings) -> EtcdOptions:
    """The way to etcd. Raises ConfigurationError."""
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
    """This machine's address on the way to etcd: the one that other nodes are likely to reach."""
    for endpoint in parse_endpoints(",".join(settings.etcd), tls_by_default=False):
        with contextlib.suppress(OSError):
            found = network.address_towards(endpoint.host, endpoint.port)
            # Its own name leads a machine to itself, on Debian to 127.0.1.1: others do not get
            # there. Who writes a loopback address means it.
            own_name = _is_loopback(found) and not _is_loopback(endpoint.host)
            return network.address_for_others() if own_name else found
    return socket.gethostname()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name() -> str:
    """The first label of this machine's name, as node names allow it."""
    return Path(socket.gethostname()).name.partition(".")[0].lower()
