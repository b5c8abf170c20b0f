"""A certificate is checked before it is used, and an error names what is wrong."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from elastic.errors import ConfigurationError
from elastic.rpc import certificates
from elastic.rpc.certificates import Role, load_certificate, verification_problem
from elastic.settings.tls_files import TlsFiles
from tests.certificates import Certificates, make_certificates, openssl, sign, sign_for_job

DAY_S = 86400.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls") / "made")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls") / "others")


@pytest.fixture(scope="module")
def digits(made: Certificates) -> TlsFiles:
    return sign_for_job(made, "digits")


def files(made: Certificates, name: str) -> TlsFiles:
    return TlsFiles(ca=made.ca, certificate=made.certificate(name), key=made.key(name))


def refused(tls: TlsFiles, job: str, role: Role, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        load_certificate(tls, job, role)


@pytest.mark.parametrize("role", Role)
def test_a_good_certificate_is_loaded(digits: TlsFiles, role: Role) -> None:
    found = load_certificate(digits, "digits", role)
    assert found.dns_names == ("digits.job.elastic",)
    assert found.not_before_s <= time.time() < found.not_after_s
    assert found.not_after_s - found.not_before_s == pytest.approx(2 * DAY_S, abs=5)
    assert digits.key is not None
    assert found.contents.key == digits.key.read_bytes()


@pytest.mark.parametrize("role", Role)
def test_a_certificate_of_several_jobs_is_accepted_for_each(made: Certificates, role: Role) -> None:
    sign(made, "several", names="DNS:a.job.elastic,DNS:b.job.elastic")
    for job in ("a", "b"):
        load_certificate(files(made, "several"), job, role)
    refused(files(made, "several"), "c", role, r"a\.job\.elastic, b\.job\.elastic; expected c\.job")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("DNS:letters.job.elastic", r"letters\.job\.elastic"),
        ("DNS:*.job.elastic", r"\*\.job\.elastic"),
        ("URI:digits.job.elastic", "no DNS name"),
        ("email:digits.job.elastic@a.example", "no DNS name"),
        ("DNS:digits.job.elastic.example", r"digits\.job\.elastic\.example"),
    ],
)
def test_certificate_of_another_job_is_refused(made: Certificates, names: str, found: str) -> None:
    sign(made, "wrong", names=names)
    why = rf"wrong\.pem is not for job 'digits': it names {found}; expected digits\.job\.elastic"
    for role in Role:
        refused(files(made, "wrong"), "digits", role, why)


@pytest.mark.parametrize("role", Role)
def test_an_expired_certificate_is_refused(made: Certificates, role: Role) -> None:
    tls = sign_for_job(made, "old", days=-1)
    refused(tls, "old", role, r"old\.pem expired at \d{4}-\d\d-\d\d .* UTC; it is now .*replace it")


def test_a_future_certificate_is_refused(digits: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates.time, "time", lambda: DAY_S)
    refused(
        digits, "digits", Role.CLIENT, "not valid before .*it is now 1970-01-02 .*set the clock"
    )


@pytest.mark.parametrize(
    ("role", "purpose", "advice"),
    [
        (
            Role.SERVER,
            "clientAuth",
            "certificates limited to the role agent, operator or viewer are for clients only; "
            "replace it with one for both serverAuth and clientAuth, or serve HTTP only at an "
            "address on 127.0.0.1",
        ),
        (Role.CLIENT, "serverAuth", "replace it with one for both serverAuth and clientAuth"),
    ],
)
def test_the_wrong_key_purpose_is_refused(
    made: Certificates, role: Role, purpose: str, advice: str
) -> None:
    sign(made, "half", names="DNS:digits.job.elastic", purpose=purpose)
    told = f"half.pem cannot be used as a {role.value}'s: unsuitable certificate purpose; {advice}$"
    refused(files(made, "half"), "digits", role, told)
    sign(made, "both", names="DNS:digits.job.elastic", purpose="clientAuth,serverAuth")
    load_certificate(files(made, "both"), "digits", role)


def test_files_that_cannot_be_used_are_named(
    made: Certificates, digits: TlsFiles, tmp_path: Path
) -> None:
    garbage, empty, absent = tmp_path / "garbage", tmp_path / "empty", tmp_path / "absent"
    garbage.write_text("garbage")
    empty.write_text("")
    for path in (garbage, empty, absent, tmp_path):
        for field in ("ca", "certificate", "key"):
            tls = dataclasses.replace(digits, **{field: path})
            refused(tls, "digits", Role.CLIENT, f"TLS .*{path}.* cannot be used: ")
    sign_for_job(made, "letters")
    tls = dataclasses.replace(digits, key=made.key("letters"))
    refused(tls, "digits", Role.SERVER, r"digits\.pem, .*letters\.key cannot be used: .*mismatch")


def test_a_key_with_a_passphrase_is_refused_without_a_prompt(
    digits: TlsFiles, tmp_path: Path
) -> None:
    locked = tmp_path / "locked.key"
    assert digits.key is not None
    openssl("pkey", "-in", digits.key, "-aes256", "-passout", "pass:secret", "-out", locked)
    tls = dataclasses.replace(digits, key=locked)
    refused(tls, "digits", Role.CLIENT, r"locked\.key cannot be used: .*without a passphrase")


def test_verification_finds_a_wrong_issuer_and_an_expired_certificate(
    digits: TlsFiles, others: Certificates, made: Certificates
) -> None:
    for role in Role:
        assert verification_problem(digits, role) == ""
        strange = dataclasses.replace(digits, ca=others.ca)
        assert "issuer" in verification_problem(strange, role)
        old = sign_for_job(made, "old", days=-1)
        assert "expired" in verification_problem(old, role)


def test_a_key_that_others_can_read_is_detected(digits: TlsFiles) -> None:
    assert digits.key is not None
    digits.key.chmod(0o600)
    assert not certificates.readable_by_others(digits.key)
    for mode in (0o640, 0o604, 0o610):
        digits.key.chmod(mode)
        assert certificates.readable_by_others(digits.key)
    digits.key.chmod(0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of root's")
def test_a_key_of_root_may_be_group_readable_for_another_user(
    digits: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert digits.key is not None
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    for mode, others in ((0o440, False), (0o640, False), (0o660, True), (0o444, True)):
        digits.key.chmod(mode)
        assert certificates.readable_by_others(digits.key) is others
    digits.key.chmod(0o600)
