"""`elastic certs` makes certificates that real connections accept, and overwrites nothing."""

from __future__ import annotations

import shutil
import stat
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic.cli import certs as module
from elastic.cli.main import app
from elastic.rpc.certificates import Role, load_certificate, verification_problem
from elastic.rpc.security import Tls
from elastic.settings.tls_files import TlsFiles
from tests.certificates import make_certificates
from tests.unit.rpc.conversation import place_at
from tests.unit.rpc.test_tls import each_role, may

ANY_PORT = "127.0.0.1:0"
DAY_S = 86400.0


def certs(*arguments: str | Path, code: int = 0) -> str:
    """The output of the command, which must exit with `code`."""
    result = CliRunner().invoke(app, ["certs", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def made(tmp_path: Path) -> Path:
    certs("init", tmp_path / "made")
    return tmp_path / "made"


def files(made: Path, name: str = "digits") -> TlsFiles:
    return TlsFiles(ca=made / "ca.pem", certificate=made / f"{name}.pem", key=made / f"{name}.key")


def tls(made: Path, name: str = "digits") -> Tls:
    return Tls(job="digits", files=files(made, name))


def issued(made: Path, *roles: str) -> Tls:
    """A certificate of the job digits that is limited to these roles."""
    limits = [word for role in roles for word in ("--role", role)]
    certs("issue", made, "--job", "digits", *limits)
    return tls(made, "-".join(("digits", *roles)))


@each_role
async def test_an_issued_certificate_permits_what_its_roles_allow(
    made: Path, roles: list[str], allowed: set[str]
) -> None:
    own = issued(made, *roles)
    coordinator = own if roles == ["coordinator"] else issued(made, "coordinator")
    async with place_at(ANY_PORT, coordinator) as place:
        assert await may(place, own) == allowed


async def test_one_certificate_without_roles_serves_all_peers(made: Path) -> None:
    async with place_at(ANY_PORT, issued(made)) as place:
        agent = await place.agent()
        await place.still_works(agent)
        assert (await place.client().status(30.0)).job == "digits"
        assert place.reports.all == []  # no warning of a key that others can read


async def test_a_job_may_have_a_long_name(made: Path) -> None:
    job = "j" * 200
    certs("issue", made, "--job", job, "--role", "agent", "--role", "coordinator", "--name", "long")
    async with place_at(ANY_PORT, Tls(job=job, files=files(made, "long"))) as place:
        await place.still_works(await place.agent())


def test_issued_files_are_private_and_verify_strictly(made: Path) -> None:
    certs("issue", made, "--job", "digits", "--host", "n1.example", "--host", "10.0.0.1")
    name = "digits-n1.example"
    assert {path.name for path in made.iterdir()} == {
        "ca.key",
        "ca.pem",
        f"{name}.key",
        f"{name}.pem",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()} == {0o600}
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    for role in Role:
        found = load_certificate(files(made, name), "digits", role)
        assert found.dns_names == ("digits.job.elastic", "n1.example")
        assert abs(found.not_after_s - datetime.now().timestamp() - 90 * DAY_S) < DAY_S
        assert verification_problem(files(made, name), role) == ""
    if shutil.which("openssl"):
        command = ["openssl", "verify", "-x509_strict", "-CAfile", made / "ca.pem"]
        looked = subprocess.run([*command, made / f"{name}.pem"], capture_output=True, text=True)
        assert looked.returncode == 0, looked.stderr


def test_each_command_prints_the_next_step(tmp_path: Path) -> None:
    said = certs("init", tmp_path / "a b")
    assert f"next: elastic certs issue '{tmp_path}/a b' --job JOB" in said
    said = certs("issue", tmp_path / "a b", "--job", "digits", "--role", "agent", "--days", "7")
    assert f"ELASTIC_TLS_CERT='{tmp_path}/a b/digits-agent.pem'" in said
    assert "job digits, agent; valid until " in said


def test_nothing_is_overwritten(made: Path) -> None:
    certs("issue", made, "--job", "digits")
    before = {path: path.read_bytes() for path in made.iterdir()}
    said = certs("init", made, code=78)
    assert "ca.pem and " in said
    assert "nothing is overwritten; choose another directory" in said
    assert "with --name" in certs("issue", made, "--job", "digits", code=78)
    (made / "letters.key").symlink_to("/nowhere")
    assert "letters.key exists" in certs("issue", made, "--job", "letters", code=78)
    (made / "letters.key").unlink()
    assert {path: path.read_bytes() for path in made.iterdir()} == before
    certs("issue", made, "--job", "digits", "--name", "digits-2")
    assert load_certificate(files(made, "digits-2"), "digits", Role.SERVER)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--job", "Digits"], "--job 'Digits' is not allowed; expected at most 200 lower-case"),
        (["--job", "digits\n"], "is not allowed"),
        (["--job", "a" * 201], "is not allowed"),
        (["--job", "digits", "--host", "*.job.elastic"], "'*.job.elastic' is not a valid host"),
        (["--job", "digits", "--host", "operator.digits.job.elastic"], "and roles with --role"),
        (["--job", "digits", "--host", "letters.JOB.elastic"], "and roles with --role"),
        (["--job", "digits", "--name", "../x"], "--name '../x' is not allowed; expected letters"),
        (["--job", "digits", "--name", "ca"], "--name 'ca' is not allowed; expected letters"),
    ],
)
def test_an_invalid_job_host_or_name_is_refused(made: Path, options: list[str], told: str) -> None:
    assert told in " ".join(certs("issue", made, *options, code=78).split())
    assert len(list(made.iterdir())) == 2


def test_an_authority_that_cannot_sign_gives_the_reason(made: Path, tmp_path: Path) -> None:
    certs("init", tmp_path / "other")
    issue = ("--job", "digits")
    said = certs("issue", tmp_path, *issue, code=78)
    assert f"make one with: elastic certs init {tmp_path}" in said
    own = (made / "ca.key").read_bytes()
    (made / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    assert "the key does not belong to the certificate" in certs("issue", made, *issue, code=78)
    (made / "ca.key").write_bytes(b"no key")
    assert "are not an authority that can sign" in certs("issue", made, *issue, code=78)
    (made / "ca.key").write_bytes(own)
    certs("issue", made, *issue)
    for suffix in ("pem", "key"):
        shutil.copy(made / f"digits.{suffix}", made / f"ca.{suffix}")
    assert "is not a CA certificate" in certs("issue", made, "--job", "letters", code=78)


def test_an_authority_made_by_openssl_can_sign(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "openssl").directory
    certs("issue", made, "--job", "digits")
    assert verification_problem(files(made), Role.CLIENT) == ""


def test_no_certificate_outlives_its_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    certs("init", made, "--days", "2")
    certs("issue", made, "--job", "digits", "--days", "90")
    found = load_certificate(files(made), "digits", Role.CLIENT)
    assert abs(found.not_after_s - datetime.now().timestamp() - 2 * DAY_S) < DAY_S / 2
    later = datetime.now(timezone.utc) + timedelta(days=3)
    monkeypatch.setattr(module, "_now", lambda: later)
    assert "the authority expired at " in certs("issue", made, "--job", "letters", code=78)


def test_a_failed_write_leaves_no_files(made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "choose another" in certs("init", tmp_path / "file", code=78)
    long = "a" * 252  # too long for a file name with its suffix
    said = certs("issue", made, "--job", "digits", "--name", long, code=78)
    assert "File name too long" in said
    assert len(list(made.iterdir())) == 2
