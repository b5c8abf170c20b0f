"""The store and the addresses of the commands that work with etcd."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from pathlib import Path

from elastic.settings.store import StoreSettings, etcd_password
from elastic.store.etcd.endpoints import parse_endpoints
from elastic.store.etcd.options import EtcdOptions, etcd_options
from elastic.store.etcd.store import EtcdStore


def open_store(settings: StoreSettings, *, total_timeout_s: float | None = None) -> EtcdStore:
    """total_timeout_s: for a call, all attempts together; None: the store's own.

    Raises ConfigurationError.
    """
    options = options_of_store(settings)
    if total_timeout_s is not None:
        options = dataclasses.replace(options, total_timeout_s=total_timeout_s)
    return EtcdStore(options)


def options_of_store(settings: StoreSettings) -> EtcdOptions:
    """The way to etcd. Raises ConfigurationError."""
    return etcd_options(
        ",".join(settings.etcd),
        ca=settings.etcd_ca,
        certificate=settings.etcd_cert,
        key=settings.etcd_key,
        user=settings.etcd_user,
        password=etcd_password(settings),
    )


def address_towards(settings: StoreSettings) -> str:
    """This machine's address on the way to etcd: the one that other nodes are likely to reach."""
    for endpoint in parse_endpoints(",".join(settings.etcd), tls_by_default=False):
        with contextlib.suppress(OSError):
            return _own_address(endpoint.host, endpoint.port)
    return socket.gethostname()


def _own_address(host: str, port: int) -> str:
    """No packet is sent: connecting a datagram socket only chooses the route."""
    family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def host_name() -> str:
    """The first label of this machine's name, as node names allow it."""
    return Path(socket.gethostname()).name.partition(".")[0].lower()
