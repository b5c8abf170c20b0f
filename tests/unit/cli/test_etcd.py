"""TLS towards etcd and this machine's address for others follow from the settings."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from elastic.cli.etcd import address_towards, options_of_store
from elastic.runtime import network
from elastic.settings.security import SecuritySettings
from elastic.settings.store import StoreSettings
from elastic.settings.tls_files import TlsFiles

OF_THE_JOB = SecuritySettings(tls_ca=Path("a"), tls_cert=Path("c"), tls_key=Path("k"))
ETCD_CA = Path("etcd-ca")


@pytest.mark.parametrize(
    ("etcd", "etcd_ca", "security", "tls"),
    [
        (
            "https://h:1",
            None,
            OF_THE_JOB,
            TlsFiles(ca=Path("a"), certificate=Path("c"), key=Path("k")),
        ),
        ("https://h:1", ETCD_CA, OF_THE_JOB, TlsFiles(ca=ETCD_CA)),
        ("https://h:1", None, SecuritySettings(), None),
        ("http://h:1", None, OF_THE_JOB, None),
        ("h:1", None, OF_THE_JOB, None),
    ],
)
def test_https_etcd_gets_the_jobs_certificates_unless_it_has_its_own_ca(
    etcd: str, etcd_ca: Path | None, security: SecuritySettings, tls: TlsFiles | None
) -> None:
    found = options_of_store(StoreSettings(etcd=(etcd,), etcd_ca=etcd_ca), security)
    assert found.tls == tls
    assert [one.tls for one in found.endpoints] == [etcd.startswith("https")]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "[::1]", "localhost"])
def test_a_loopback_etcd_gives_a_loopback_address(host: str) -> None:
    assert address_towards(StoreSettings(etcd=(f"{host}:29400",))) in ("127.0.0.1", "::1")


@pytest.mark.parametrize("led_to", ["127.0.1.1", "127.0.0.1"])
def test_a_name_that_resolves_to_loopback_gives_the_address_for_others(
    monkeypatch: pytest.MonkeyPatch, led_to: str
) -> None:
    """Debian's /etc/hosts maps a machine's own name to 127.0.1.1."""
    resolve = socket.getaddrinfo

    def own_name(host: str, *rest: object, **named: object) -> object:
        return resolve(led_to if host == "n1" else host, *rest, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(network.socket, "getaddrinfo", own_name)
    monkeypatch.setattr(network, "reachable_address", lambda: "10.0.0.1")
    assert address_towards(StoreSettings(etcd=("n1:29400",))) == "10.0.0.1"


def test_a_name_that_does_not_resolve_is_passed_over() -> None:
    etcd = ("no-such-host.invalid:1", "127.0.0.1:1")
    assert address_towards(StoreSettings(etcd=etcd)) == "127.0.0.1"
    assert address_towards(StoreSettings(etcd=etcd[:1])) == socket.gethostname()
