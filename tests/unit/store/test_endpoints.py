"""Options for etcd are parsed; an error tells the operator what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.errors import ConfigurationError
from elastic.store.etcd.endpoints import Endpoint, EtcdOptions, etcd_options, parse_endpoints


def test_endpoints_with_schemes_use_tls_as_the_scheme_says() -> None:
    assert parse_endpoints("http://a:1, https://b:2,") == (
        Endpoint("a", 1, tls=False),
        Endpoint("b", 2, tls=True),
    )


def test_endpoints_without_schemes_use_the_default_port_and_tls() -> None:
    assert parse_endpoints("a:1,b") == (Endpoint("a", 1, tls=False), Endpoint("b", 2379, tls=False))
    assert parse_endpoints("a:1", tls_by_default=True) == (Endpoint("a", 1, tls=True),)


def test_the_same_member_counts_once() -> None:
    assert len(parse_endpoints("a:1,http://a:1")) == 1


def test_an_ipv6_address_keeps_its_brackets() -> None:
    (endpoint,) = parse_endpoints("https://[::1]:2379/")
    assert endpoint.target == "[::1]:2379"
    assert str(endpoint) == "https://[::1]:2379"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no etcd endpoint"),
        (" , ", "no etcd endpoint"),
        ("grpc://a:1", "unknown scheme 'grpc'"),
        ("http://", "expected HOST:PORT"),
        ("a:port", "Port could not be cast"),
        ("a:99999", "Port out of range"),
        ("http://a:1/v3", "expected HOST:PORT"),
        ("http://user:secret@a:1", "expected HOST:PORT"),
    ],
)
def test_a_wrong_endpoint_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        parse_endpoints(text)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs a password"):
        etcd_options("a:1", user="root")
    with pytest.raises(ConfigurationError, match="no endpoint starts with https://: http://a:1"):
        etcd_options("http://a:1", ca=Path("ca.pem"))
    with pytest.raises(ConfigurationError, match="needs its key"):
        etcd_options("a:1", certificate=Path("me.pem"))


def test_a_ca_file_turns_tls_on() -> None:
    assert etcd_options("a:1", ca=Path("ca.pem")).endpoints[0].tls


def test_the_password_is_not_shown() -> None:
    options = EtcdOptions(endpoints=parse_endpoints("a:1"), user="root", password="secret")
    assert "secret" not in repr(options)
