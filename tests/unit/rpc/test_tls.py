"""Mutual TLS on real connections: accepted peers, refusals with their reasons, changing files."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from elastic.errors import ConfigurationError
from elastic.rpc import newest_certificate
from elastic.rpc.admission import Admission
from elastic.rpc.certificates import Role
from elastic.rpc.control_client import ControlClient, CoordinatorLost, CoordinatorRefused
from elastic.rpc.handshake_probe import explain
from elastic.rpc.newest_certificate import (
    NewestCertificate,
    server_credentials,
    warn_of_expiry,
)
from elastic.rpc.security import PLAINTEXT, Plaintext, Security, Tls
from elastic.settings.tls_files import TlsFiles
from elastic.v1 import control_pb2 as pb
from tests.certificates import Certificates, make_certificates, sign, sign_for_job
from tests.unit.rpc.conversation import HELLO, Conversation, Place, Reports, place_at

ANY_PORT = "127.0.0.1:0"
STATUS_S = 30.0
METHODS = pb.DESCRIPTOR.services_by_name["Control"].methods


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority with certificates of jobs digits and letters, and an expired one of digits."""
    made = make_certificates(tmp_path_factory.mktemp("tls") / "made")
    sign_for_job(made, "letters")
    sign_for_job(made, "digits")
    sign(made, "expired", names="DNS:digits.job.elastic", days=-1)
    return made


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Another authority, which has signed for the same job."""
    others = make_certificates(tmp_path_factory.mktemp("tls") / "others")
    sign_for_job(others, "digits")
    return others


def tls(made: Certificates, name: str = "digits", *, job: str = "digits") -> Tls:
    files = TlsFiles(ca=made.ca, certificate=made.certificate(name), key=made.key(name))
    return Tls(job=job, files=files)


def with_ca(security: Tls, made: Certificates) -> Tls:
    return Tls(job=security.job, files=dataclasses.replace(security.files, ca=made.ca))


@pytest.mark.parametrize("address", [ANY_PORT, "unix"])
async def test_both_ends_accept_certificates_of_the_job(
    made: Certificates, tmp_path: Path, address: str
) -> None:
    address = f"unix:{tmp_path}/c.sock" if address == "unix" else address
    async with place_at(address, tls(made)) as place:
        agent = await place.agent()
        await place.still_works(agent)
        assert (await place.client().status(STATUS_S)).job == "digits"
        assert place.reports.all == []


async def test_a_certificate_of_a_job_with_a_long_name_is_accepted(made: Certificates) -> None:
    """A label of a DNS name has at most 63 characters, so the name is split."""
    job = "0123456789" * 20
    identity = f"{job[:63]}.{job[63:126]}.{job[126:189]}.{job[189:]}.job.elastic"
    sign(made, "long", names=f"DNS:{identity},DNS:agent.{identity},DNS:coordinator.{identity}")
    async with place_at(ANY_PORT, tls(made, "long", job=job)) as place:
        agent = await place.agent()
        await place.still_works(agent)
        assert await explain(place.address, tls(made, "long", job=job)) == ""


@pytest.mark.parametrize("protected", [True, False])
async def test_explain_is_empty_for_a_working_or_an_absent_coordinator(
    made: Certificates, protected: bool
) -> None:
    security = tls(made) if protected else PLAINTEXT
    async with place_at(ANY_PORT, security) as place:
        assert await explain(place.address, security) == ""
        assert await explain("127.0.0.1:1", security) == ""


# ---- roles


def limited(made: Certificates, *roles: str) -> Tls:
    name = "-".join(("digits", *roles))
    names = ["DNS:digits.job.elastic", *(f"DNS:{role}.digits.job.elastic" for role in roles)]
    sign(made, name, names=",".join(names))
    return tls(made, name)


@contextlib.contextmanager
def explained(role: str) -> Iterator[None]:
    """Check that a refusal in this block names the role that the call needs."""
    try:
        yield
    except ConfigurationError as error:
        if f"is for certificates of {role}.digits.job.elastic" not in str(error):
            raise AssertionError(str(error)) from error
        raise


async def attends(place: Place, security: Security) -> None:
    """Attend as an agent does. Try again if gRPC could no longer send the hello: that error hides
    the refusal that came before it."""
    while True:
        try:
            await place.agent(security, node="n2")
        except CoordinatorLost as error:
            hidden_by = error.__cause__
            if not isinstance(hidden_by, grpc.aio.AioRpcError):
                raise
            if hidden_by.code() is not grpc.StatusCode.INTERNAL:
                raise
        else:
            return


async def may(place: Place, security: Security) -> set[str]:
    """The actions that a certificate permits; each refusal must name the role that it needs.

    Each role by itself: test_rights.py.
    """
    client, allowed = place.client(security), set()
    asked: dict[str, Callable[[], Awaitable[Any]]] = {
        "attend": lambda: attends(place, security),
        "see": lambda: client.status(STATUS_S),
        "follow": lambda: anext(client.events(follow=False), None),
        "incidents": lambda: client.incidents(0, STATUS_S),
        "timeline": lambda: client.timeline(0, STATUS_S),
        "stop": lambda: client.stop("why", 1, STATUS_S),
        "drain": lambda: client.drain("n1", "", STATUS_S),
        "clear": lambda: client.clear("n1", STATUS_S),
        "stacks": lambda: client.stacks("", STATUS_S),
    }
    for what, ask in asked.items():
        role = "agent" if what == "attend" else "operator"
        with contextlib.suppress(ConfigurationError), explained(role):
            await ask()
            allowed.add(what)
    return allowed


SEE = {"see", "follow", "incidents", "timeline"}
ACT = {"stop", "drain", "clear", "stacks"}


each_role = pytest.mark.parametrize(
    ("roles", "allowed"),
    [
        (["viewer"], SEE),
        (["agent", "operator"], {"attend"} | SEE | ACT),
    ],
)


@each_role
async def test_a_certificate_is_limited_to_its_roles(
    made: Certificates, roles: list[str], allowed: set[str]
) -> None:
    async with place_at(ANY_PORT, limited(made, "coordinator")) as place:
        assert await may(place, limited(made, *roles)) == allowed


async def test_a_peer_with_a_role_refuses_a_coordinator_without_the_coordinator_role(
    made: Certificates,
) -> None:
    """Otherwise a stolen certificate of a node would suffice to pose as a coordinator."""
    why = r"certificate is refused: .*expected one for coordinator\.digits\.job\.elastic, .*--role"
    await refused(tls(made), limited(made, "agent"), why)


async def test_a_misspelt_role_grants_nothing(made: Certificates) -> None:
    sign(made, "slip", names="DNS:digits.job.elastic,DNS:viewr.digits.job.elastic")
    async with place_at(ANY_PORT, limited(made, "coordinator")) as place:
        await Stranger(place, made, (made, "slip")).fails(grpc.StatusCode.PERMISSION_DENIED)
        with pytest.raises(ConfigurationError, match=r"slip\.pem names viewr\.digits\."):
            await place.client(tls(made, "slip")).status(STATUS_S)


async def test_a_coordinator_of_other_roles_does_not_start(made: Certificates) -> None:
    with pytest.raises(
        ConfigurationError, match=r"limited to roles other than coordinator.*coordinator\.digits\."
    ):
        async with place_at(ANY_PORT, limited(made, "agent", "operator")):
            pass


# ---- refusals and their reasons


async def refused(coordinator: Security, security: Security, why: str) -> None:
    """Status and attend are refused with the reason `why`; another agent is not disturbed."""
    async with place_at(ANY_PORT, coordinator) as place:
        other = await place.agent(node="other")
        with pytest.raises(ConfigurationError, match=why):
            await place.client(security).status(STATUS_S)
        agent = Conversation(place.client(security), HELLO)
        with pytest.raises(ConfigurationError, match=why):
            await agent.ended
        await place.still_works(other)


async def test_an_agent_of_another_job_does_not_trust_this_coordinator(made: Certificates) -> None:
    why = r"certificate is refused: Hostname mismatch.*expected one for letters\.job\.elastic"
    await refused(tls(made), tls(made, "letters", job="letters"), why)


async def test_a_client_does_not_show_a_certificate_of_another_job(made: Certificates) -> None:
    why = r"letters\.pem is not for job 'digits': it names letters\.job\.elastic"
    await refused(tls(made), tls(made, "letters"), why)


async def test_a_client_does_not_show_an_expired_certificate(made: Certificates) -> None:
    await refused(tls(made), tls(made, "expired"), r"expired\.pem expired")


async def test_a_certificate_of_another_authority_is_refused(
    made: Certificates, others: Certificates
) -> None:
    why = r"does not accept the certificate .*digits\.pem \(.*issuer.*--tls-ca"
    await refused(tls(made), with_ca(tls(others), made), why)


async def test_a_coordinator_of_another_authority_is_refused(
    made: Certificates, others: Certificates
) -> None:
    why = "certificate is refused: .*issuer.*signed by an authority in .*others/ca.pem"
    await refused(tls(made), with_ca(tls(made), others), why)


async def test_plain_text_is_refused_where_tls_is_expected(made: Certificates) -> None:
    await refused(tls(made), PLAINTEXT, "expects TLS: give --tls-ca")


async def test_tls_is_refused_where_plain_text_is_spoken(made: Certificates) -> None:
    await refused(PLAINTEXT, tls(made), "does not speak matching TLS")


async def test_a_coordinator_whose_certificate_has_expired_is_refused(made: Certificates) -> None:
    """This server does not check its own certificate."""
    pair = made.key("expired").read_bytes(), made.certificate("expired").read_bytes()
    credentials = grpc.ssl_server_credentials([pair])
    server = grpc.aio.server()
    port = server.add_secure_port(ANY_PORT, credentials)
    await server.start()
    client = ControlClient(f"127.0.0.1:{port}", security=tls(made))
    with pytest.raises(CoordinatorRefused, match=r"certificate has expired.*the clock"):
        await client.status(STATUS_S)
    await client.close()
    await server.stop(0)


@pytest.mark.parametrize(
    ("name", "why"), [("expired", "expired at"), ("letters", "is not for job")]
)
async def test_a_coordinator_does_not_start_with_a_certificate_that_nobody_can_accept(
    made: Certificates, name: str, why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        async with place_at(ANY_PORT, tls(made, name)):
            pass


# ---- peers that do not check their own certificate


def channel_of(
    address: str, made: Certificates, shown: tuple[Certificates, str] | None
) -> grpc.aio.Channel:
    pair = {}
    if shown is not None:
        pair["private_key"] = shown[0].key(shown[1]).read_bytes()
        pair["certificate_chain"] = shown[0].certificate(shown[1]).read_bytes()
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(root_certificates=made.ca.read_bytes(), **pair),
        options=[
            ("grpc.ssl_target_name_override", "digits.job.elastic"),
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


class Stranger:
    """A client that shows `shown`, or no certificate, without checking it."""

    def __init__(self, place: Place, made: Certificates, shown: tuple[Certificates, str] | None):
        self.channel = channel_of(place.address, made, shown)

    async def fails(self, code: grpc.StatusCode, why: str = "") -> None:
        """Every method fails with `code` and the reason `why`."""
        for method in METHODS:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await self._call(method)
            while "Internal error from Core" in str(error.value.details()):
                # The client's data may come after the refusal: gRPC then reports nothing else.
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await self._call(method)
            assert error.value.code() is code, method.name
            assert why in str(error.value.details())
        await self.channel.close()

    async def _call(self, method: Any) -> None:
        path = f"/{method.containing_service.full_name}/{method.name}"
        if method.client_streaming:
            call = self.channel.stream_stream(path)(iter([b""]), timeout=STATUS_S)
        elif method.server_streaming:
            call = self.channel.unary_stream(path)(b"", timeout=STATUS_S)
        else:
            await self.channel.unary_unary(path)(b"", timeout=STATUS_S)
            return
        async for _ in call:
            pass


@pytest.mark.parametrize(
    "names",
    ["DNS:letters.job.elastic", "DNS:*.job.elastic", "URI:digits.job.elastic", "DNS:digits"],
)
async def test_every_method_refuses_a_certificate_that_does_not_name_the_job(
    made: Certificates, names: str
) -> None:
    sign(made, "stranger", names=names)
    async with place_at(ANY_PORT, tls(made)) as place:
        agent = await place.agent()
        found = names.removeprefix("DNS:") if names.startswith("DNS:") else "no DNS name"
        await Stranger(place, made, (made, "stranger")).fails(
            grpc.StatusCode.PERMISSION_DENIED,
            f"of job 'digits', for certificates of digits.job.elastic; the one shown names {found}",
        )
        reports = place.reports.named("peer_refused")
        refused = dict.fromkeys(r["method"] for r in reports)  # gRPC may try one of them again
        assert list(refused) == [m.name for m in METHODS]
        assert {(r["expected"], r["found"]) for r in reports} == {("digits.job.elastic", found)}
        assert all(str(r["peer"]).startswith("ipv4:127.0.0.1:") for r in reports)
        assert place.recorder.heard.empty()
        await place.still_works(agent)


def sign_with_nul(made: Certificates, name: str) -> None:
    """Sign a certificate whose DNS entry has a NUL behind the job's name, as openssl's own command
    does not."""
    sign(made, name)
    key = serialization.load_pem_private_key(made.key(name).read_bytes(), None)
    authority = x509.load_pem_x509_certificate(made.ca.read_bytes())
    now = datetime.datetime.now(datetime.timezone.utc)
    nul = x509.SubjectAlternativeName([x509.DNSName("digits.job.elastic\0.evil.example")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(nul, critical=True)
        .sign(
            serialization.load_pem_private_key(made.key("ca").read_bytes(), None), hashes.SHA256()
        )
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    made.certificate(name).write_bytes(pem)


async def test_nothing_that_a_stranger_sends_is_parsed(made: Certificates) -> None:
    """38 MB of empty messages inside one would be gigabytes of objects."""
    parsed: list[int] = []

    def read(data: bytes) -> bytes:
        parsed.append(len(data))
        return data

    async def ask(request: bytes, _: object) -> bytes:
        return request

    handlers = {"Stop": grpc.unary_unary_rpc_method_handler(ask, request_deserializer=read)}
    reports = Reports()
    server = grpc.aio.server(interceptors=[Admission(tls(made), reports)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
    credentials = server_credentials(tls(made), reports)
    port = server.add_secure_port(ANY_PORT, credentials)
    await server.start()
    sign(made, "stranger", names="DNS:letters.job.elastic")
    for name, size in ("stranger", 3 * 2**20), ("digits", 1):
        channel = channel_of(f"127.0.0.1:{port}", made, (made, name))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await channel.unary_unary("/t/Stop")(bytes(size))
        await channel.close()
    await server.stop(0)
    assert parsed == [1]
    assert reports.named("peer_refused")


async def test_a_name_is_not_cut_at_a_nul(made: Certificates) -> None:
    sign_with_nul(made, "nul")
    async with place_at(ANY_PORT, tls(made)) as place:
        await Stranger(place, made, (made, "nul")).fails(grpc.StatusCode.PERMISSION_DENIED)
        assert place.recorder.heard.empty()


@pytest.mark.parametrize("shown", ["nothing", "expired", "others"])
async def test_a_connection_without_a_valid_certificate_fails(
    made: Certificates, others: Certificates, shown: str
) -> None:
    which = {"nothing": None, "expired": (made, "expired"), "others": (others, "digits")}[shown]
    async with place_at(ANY_PORT, tls(made)) as place:
        agent = await place.agent()
        await Stranger(place, made, which).fails(grpc.StatusCode.UNAVAILABLE)
        assert place.recorder.heard.empty()
        await place.still_works(agent)


# ---- files that change


@pytest.fixture
def used(made: Certificates, tmp_path: Path) -> Tls:
    """A copy of the files of digits that tests replace."""
    put(made, "digits", tmp_path)
    files = TlsFiles(ca=tmp_path / "ca", certificate=tmp_path / "cert", key=tmp_path / "key")
    return Tls(job="digits", files=files)


def put(made: Certificates, name: str, directory: Path, *, which: str = "ca cert key") -> None:
    sources = {"ca": made.ca, "cert": made.certificate(name), "key": made.key(name)}
    for kind in which.split():
        shutil.copy(sources[kind], directory / kind)


async def test_a_new_authority_takes_effect_without_a_restart_of_either_side(
    made: Certificates, others: Certificates, used: Tls, tmp_path: Path
) -> None:
    """The open stream stays; from then on only certificates of the new authority are accepted."""
    async with place_at(ANY_PORT, used) as place:
        agent = await place.agent()
        lasting = place.client()
        await lasting.status(STATUS_S)
        put(others, "digits", tmp_path)
        assert (await lasting.status(STATUS_S)).job == "digits"
        later = await place.agent(node="later")
        await place.still_works(agent)
        reloaded = await place.reports.wait("certificates_reloaded", 2)
        assert str(reloaded["expires"]).endswith("UTC")
        with pytest.raises(ConfigurationError):
            await place.client(tls(made)).status(STATUS_S)
        assert not agent.ended.done()
        assert not later.ended.done()
        assert not place.reports.named("certificates_refused")


async def test_a_stream_outlives_the_replacement_of_its_own_certificate(
    others: Certificates, used: Tls, tmp_path: Path
) -> None:
    """One client serves the stream and a request that needs a new connection."""
    async with place_at(ANY_PORT, used) as place:
        client = place.client()
        agent = Conversation(client, HELLO)
        await place.recorder.heard.get()
        second = Conversation(client, HELLO)
        await place.recorder.heard.get()
        for _ in range(2):
            put(others, "digits", tmp_path)
            assert (await client.status(STATUS_S)).job == "digits"
            await place.still_works(agent)
        second.send(None)
        with pytest.raises(CoordinatorLost):
            await second.ended
        await place.still_works(agent)


async def test_two_authorities_in_one_file_are_both_trusted(
    made: Certificates, others: Certificates, tmp_path: Path
) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(made.ca.read_bytes() + others.ca.read_bytes())

    def trusting_both(security: Tls) -> Tls:
        return Tls(job=security.job, files=dataclasses.replace(security.files, ca=both))

    for shown in (made, others):
        async with place_at(ANY_PORT, trusting_both(tls(shown))) as place:
            for mine in (made, others):
                client = place.client(trusting_both(tls(mine)))
                assert (await client.status(STATUS_S)).job == "digits"


async def test_an_agent_comes_back_with_the_newest_certificate(
    made: Certificates, others: Certificates, used: Tls, tmp_path: Path
) -> None:
    """One client throughout. While only the coordinator has new files, the client gets no more than
    `CoordinatorLost`, after which it tries again."""
    async with place_at(ANY_PORT, tls(made)) as place:
        client = ControlClient(place.address, security=used, report=place.reports)
        agent = Conversation(client, HELLO)
        await place.recorder.heard.get()
        await place.still_works(agent)
        address = place.address
    with pytest.raises(CoordinatorLost):
        await agent.ended
    async with place_at(address, tls(others)) as place:
        with pytest.raises(CoordinatorLost, match=r"certificate is refused.*issuer"):
            await Conversation(client, HELLO).ended
        put(others, "digits", tmp_path)
        again = Conversation(client, HELLO)
        await place.recorder.heard.get()
        await place.still_works(again)
        await client.close()
        with pytest.raises((CoordinatorLost, asyncio.CancelledError)):
            await again.ended


@pytest.mark.parametrize("bad", ["cert only", "expired", "garbage", "gone", "another job"])
async def test_unusable_new_files_keep_the_old_certificate_and_are_reported_once(
    made: Certificates, others: Certificates, used: Tls, tmp_path: Path, bad: str
) -> None:
    why = {
        "cert only": "mismatch",
        "expired": "expired at",
        "garbage": "cannot be used",
        "gone": "No such file",
        "another job": "is not for job",
    }[bad]

    def spoil() -> None:
        if bad == "cert only":
            put(others, "digits", tmp_path, which="cert")
        elif bad == "expired":
            put(made, "expired", tmp_path)
        elif bad == "garbage":
            (tmp_path / "cert").write_bytes(b"-----BEGIN CERTIFICATE-----\nhalf wri")
        elif bad == "gone":
            (tmp_path / "key").unlink()
        else:
            put(made, "letters", tmp_path)

    async with place_at(ANY_PORT, used) as place:
        agent = await place.agent()
        spoil()
        for _ in range(3):
            client = place.client(tls(made))
            assert (await client.status(STATUS_S)).job == "digits"
        report = await place.reports.wait("certificates_refused")
        assert why in str(report["reason"])
        assert str(report["reason"]).endswith("; the previous certificate stays in use")
        assert len(place.reports.named("certificates_refused")) == 1
        put(others, "digits", tmp_path)
        await place.client(tls(others)).status(STATUS_S)
        await place.reports.wait("certificates_reloaded")
        await place.still_works(agent)


async def test_a_new_client_shows_the_kept_certificate_when_the_files_are_unusable(
    made: Certificates, used: Tls, tmp_path: Path
) -> None:
    """The new client is made after the files were replaced."""
    async with place_at(ANY_PORT, used) as place:
        await place.agent()
        put(made, "expired", tmp_path)
        assert (await place.client().status(STATUS_S)).job == "digits"
        refused = await place.reports.wait("certificates_refused")
        assert str(refused["reason"]).endswith("; the previous certificate stays in use")
        with pytest.raises(ConfigurationError, match="expired at"):
            await place.client(replace(used, kept={})).status(STATUS_S)


async def test_the_end_of_a_certificate_is_reported_14_days_and_a_day_before(
    made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, reports, now = asyncio.Event(), Reports(), time.time()

    async def next_look(seconds: float) -> None:
        assert seconds <= 60.0  # for so long the status and the metrics tell of replaced files
        looks.set()
        await real_sleep(0)

    real_sleep = asyncio.sleep
    monkeypatch.setattr(newest_certificate.asyncio, "sleep", next_look)
    sign(made, "ending", names="DNS:digits.job.elastic", days=20)
    newest = NewestCertificate(tls(made, "ending"), Role.CLIENT, reports)
    warning = asyncio.ensure_future(warn_of_expiry(newest, reports))

    async def told_after(days: float) -> list[int]:
        monkeypatch.setattr(newest_certificate.time, "time", lambda: now + days * 86_400)
        for _ in range(3):
            looks.clear()
            await looks.wait()
        return [int(e["left_s"]) // 86_400 for e in reports.named("certificate_expires")]  # type: ignore[call-overload]

    assert await told_after(5) == []
    assert await told_after(7.5) == [12]
    assert await told_after(18.5) == [12]
    assert await told_after(19.5) == [12, 0]
    sign(made, "ending", names="DNS:digits.job.elastic", days=30)
    assert await told_after(19.6) == [12, 0, 10]
    assert newest.expires_unix_s == pytest.approx(now + 30 * 86_400, abs=600)
    warning.cancel()


async def test_insecure_plain_text_works_with_a_warning() -> None:
    async with place_at("0.0.0.0:0", Plaintext(insecure=True)) as place:
        place.address = place.address.replace("0.0.0.0", "127.0.0.1")
        assert (await place.client(PLAINTEXT).status(STATUS_S)).job == "digits"
        assert place.reports.named("security_warning")
