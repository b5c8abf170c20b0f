"""Where plain text is allowed, and which security the settings choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.errors import ConfigurationError
from elastic.rpc.control import ControlServer
from elastic.rpc.control_client import ControlClient
from elastic.rpc.security import (
    PLAINTEXT,
    Plaintext,
    Tls,
    choose_security,
    require_protection,
    stays_here,
)
from elastic.settings.fields import options_of
from elastic.settings.security import SecuritySettings
from elastic.settings.tls_files import TlsFiles
from tests.unit.rpc.conversation import Recorder, Reports

HERE = ["unix:/run/c.sock", "127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1"]
BEYOND = ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "[fe80::1]:1", "localhost.example:1", "trainer:1"]
FILES = TlsFiles(ca=Path("ca.pem"), certificate=Path("me.pem"), key=Path("me.key"))


@pytest.mark.parametrize("address", HERE)
def test_plain_text_within_this_machine_gives_no_warning(address: str) -> None:
    assert stays_here(address)
    reports = Reports()
    require_protection(address, PLAINTEXT, reports)
    assert reports.all == []


@pytest.mark.parametrize("address", BEYOND)
def test_plain_text_beyond_this_machine_is_refused_or_warned_of_if_insecure(address: str) -> None:
    assert not stays_here(address)
    with pytest.raises(ConfigurationError) as refused:
        require_protection(address, PLAINTEXT, Reports())
    for part in (address, "--tls-ca", "--tls-cert", "--tls-key", "--insecure"):
        assert part in str(refused.value)
    reports = Reports()
    require_protection(address, Plaintext(insecure=True), reports)
    ((name, fields),) = reports.all
    assert name == "security_warning"
    assert address in str(fields["message"])


def test_server_and_client_refuse_plain_text_beyond_this_machine() -> None:
    with pytest.raises(ConfigurationError, match="--insecure"):
        ControlServer(Recorder(), "0.0.0.0:0")
    with pytest.raises(ConfigurationError, match="--insecure"):
        ControlClient("10.0.0.1:1")
    reports = Reports()
    ControlClient("10.0.0.1:1", security=Plaintext(insecure=True), report=reports)
    assert reports.named("security_warning")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True)])
def test_a_key_that_others_can_read_is_warned_of(tmp_path: Path, mode: int, warned: bool) -> None:
    key = tmp_path / "me.key"
    key.touch(mode)
    key.chmod(mode)
    reports = Reports()
    tls = Tls(job="digits", files=TlsFiles(ca=FILES.ca, certificate=FILES.certificate, key=key))
    require_protection("10.0.0.1:1", tls, reports)
    messages = [str(fields["message"]) for fields in reports.named("security_warning")]
    assert bool(messages) == warned
    assert all(f"chmod 600 {key}" in message for message in messages)


def test_settings_choose_plain_text_insecure_or_tls() -> None:
    assert choose_security("digits", SecuritySettings()) == Plaintext()
    insecure = choose_security("digits", SecuritySettings(insecure=True))
    assert insecure == Plaintext(insecure=True)
    all_three = SecuritySettings(tls_ca=FILES.ca, tls_cert=FILES.certificate, tls_key=FILES.key)
    assert choose_security("digits", all_three) == Tls(job="digits", files=FILES)


def test_contradicting_tls_settings_are_refused_with_every_reason() -> None:
    half = SecuritySettings(tls_ca=FILES.ca, insecure=True)
    with pytest.raises(ConfigurationError) as refused:
        choose_security("digits", half)
    needs, excludes = str(refused.value).splitlines()
    assert needs == "--tls-ca: mutual TLS also needs --tls-cert, --tls-key"
    assert excludes.startswith("--tls-ca and --insecure cannot be used together")


def test_the_options_are_those_that_messages_name() -> None:
    flags = [option.flag for option in options_of(SecuritySettings)]
    assert flags == ["--tls-ca", "--tls-cert", "--tls-key", "--insecure"]
