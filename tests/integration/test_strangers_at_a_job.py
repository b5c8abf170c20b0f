"""Clients with wrong credentials or garbage are refused, and the job trains on."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from elastic.settings.tls_files import TlsFiles
from elastic.v1 import control_pb2 as pb
from elastic.v1 import control_pb2_grpc as pb_grpc
from tests.certificates import Certificates, make_certificates, sign, sign_for_job
from tests.etcd_cluster import EtcdCluster, etcd_cluster, free_ports
from tests.integration.loopback_job import (
    NODES,
    LoopbackJob,
    TrainingJob,
    tls_environment,
    training_job,
)
from tests.integration.running import CONFIGURATION, Place
from tests.job_process import CommandProcess

JOB = "first"
NAMES = f"DNS:{JOB}.job.elastic"
TEMPORARY, REFUSED, TERMINATED = 75, 83, 143
COMMANDS = ("agent", "coordinator", "status")
CLIENTS = ("agent", "status")
"""The commands that are clients of the coordinator."""
pytestmark = pytest.mark.alone  # an overloaded machine loses nodes too


class Guarded:
    """A job with mutual TLS on an etcd that asks for a password."""

    def __init__(self, job: TrainingJob, made: Certificates, others: Certificates) -> None:
        self.job, self.made, self.others = job, made, others

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Check that the same group trains on after the block, and no node was lost meanwhile."""
        before = self.job.generation(), len(self.job.events("node_lost"))
        yield
        self.job.wait_for_more_steps()
        after = self.job.generation(), len(self.job.events("node_lost"))
        assert after == before, self.job.story()
        for node in NODES:
            assert self.job.agents[node][-1].process.poll() is None

    def command(self, what: str, **environment: str) -> CommandProcess:
        """Start a stranger's command on the same machine."""
        if what == "agent":
            return self.job.start(*self.job.agent_command("stranger"), **environment)
        if what == "coordinator":
            (port,) = free_ports(1)
            where = ("--listen", f"127.0.0.1:{port}", "--events-file", "/dev/stderr")
            return self.job.start(what, *where, **environment)
        return self.job.start(what, **environment)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strangers")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster(size=1) as cluster:
        for command in ("user add root:secret", "user grant-role root root", "auth enable"):
            cluster.ctl(*command.split())
        yield cluster


@pytest.fixture(scope="module")
def guarded(files: Path, etcd: EtcdCluster) -> Iterator[Guarded]:
    made = make_certificates(files / "made")
    others = make_certificates(files / "others")
    papers = tls_environment(sign_for_job(made, JOB))
    place = Place(files)
    user = {"ELASTIC_ETCD_USER": "root", "ELASTIC_ETCD_PASSWORD": "secret"}
    try:
        with training_job(place, etcd=etcd.endpoints(), job=JOB, **user, **papers) as job:
            yield Guarded(job, made, others)
    finally:
        place.close()


# ---- wrong credentials


@pytest.mark.parametrize(
    ("papers", "why"),
    [
        ("expired", r"certificate .*expired.pem expired at .* replace it, or set the clock"),
        ("second", r"second.pem is not for job 'first': it names second.job.elastic; expected"),
        ("wildcard", r"wildcard.pem is not for job 'first'.*a wildcard does not count"),
    ],
)
def test_an_expired_or_foreign_certificate_is_refused(
    guarded: Guarded, papers: str, why: str
) -> None:
    days = -1 if papers == "expired" else 2
    names = {"second": "DNS:second.job.elastic", "wildcard": "DNS:*.job.elastic"}.get(papers, NAMES)
    sign(guarded.made, papers, days=days, names=names)
    with guarded.undisturbed():
        _all_refused(guarded, COMMANDS, why, **_papers(guarded.made, papers))


def test_a_certificate_of_another_authority_is_refused(guarded: Guarded) -> None:
    sign(guarded.others, "stranger", names=NAMES)
    papers = _papers(guarded.others, "stranger")
    own = {**papers, "ELASTIC_TLS_CA": str(guarded.made.ca)}
    with guarded.undisturbed():
        why = r"the coordinator's certificate is refused: .*expected one signed by an authority in"
        _all_refused(guarded, CLIENTS, why, **papers)
        why = (
            r"the coordinator does not accept the certificate .*stranger.pem .*unable to get local"
        )
        _all_refused(guarded, CLIENTS, why, **own)


def test_a_wrong_etcd_password_is_refused(guarded: Guarded) -> None:
    with guarded.undisturbed():
        why = "the user or the password is wrong"
        _all_refused(guarded, COMMANDS, why, ELASTIC_ETCD_PASSWORD="wrong")


@pytest.mark.long
def test_endpoints_that_do_not_answer_are_named_one_by_one(guarded: Guarded) -> None:
    ports = free_ports(3)
    endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
    with guarded.undisturbed():
        commands = {what: guarded.command(what, ELASTIC_ETCD=endpoints) for what in COMMANDS}
        assert commands["status"].wait() == TEMPORARY, commands["status"].story()
        told = [commands.pop("status").messages[-1]]
        for command in commands.values():  # a daemon waits for its etcd, and says so
            told.append(command.wait_for(lambda at=command: _of_etcd(at), "a warning of etcd"))
            command.process.terminate()
            assert command.wait() == TERMINATED, command.story()
        for port in ports:
            assert all(f"127.0.0.1:{port}: " in message for message in told), told


def test_an_agent_with_another_isolation_timeout_is_refused(guarded: Guarded) -> None:
    with guarded.undisturbed():
        command = guarded.command("agent", ELASTIC_ISOLATION_TIMEOUT_S="600")
        _refused(
            command,
            "--isolation-timeout-s 600, this coordinator 120:.* give both the same",
            REFUSED,
        )


def test_a_misconfigured_agent_leaves_its_workers_to_the_next_agent(guarded: Guarded) -> None:
    job = guarded.job
    pid, generation = job.worker_pid("a"), job.generation()
    job.agents["a"][-1].process.kill()
    job.agents["a"][-1].wait()
    wrong = job.start_agent("a", ELASTIC_ISOLATION_TIMEOUT_S="600")
    _refused(wrong, "--isolation-timeout-s 600, this coordinator 120:", REFUSED)
    assert wrong.named("handing_over")
    right = job.start_agent("a")
    right.wait_for_event("worker_adopted", pid=pid)
    with guarded.undisturbed():
        pass
    assert (job.worker_pid("a"), job.generation()) == (pid, generation)


def _papers(made: Certificates, name: str) -> dict[str, str]:
    files = TlsFiles(ca=made.ca, certificate=made.certificate(name), key=made.key(name))
    return tls_environment(files)


def _of_etcd(command: CommandProcess) -> str | None:
    warnings = [e["message"] for e in command.events if e["event"] == "warning"]
    return next((w for w in warnings if "etcd did not answer" in w), None)


def _all_refused(guarded: Guarded, commands: tuple[str, ...], why: str, **environment: str) -> None:
    for command in [guarded.command(what, **environment) for what in commands]:
        _refused(command, why)


def _refused(command: CommandProcess, why: str, code: int = CONFIGURATION) -> None:
    assert command.wait() == code, command.story()
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(command.messages[-1])


# ---- garbage


def _noise(length: int) -> bytes:
    return random.Random(length).randbytes(length)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", _noise(100), _noise(1_000_000)])
def test_garbage_on_the_coordinators_port_disturbs_nothing(guarded: Guarded, noise: bytes) -> None:
    host, _, port = guarded.job.address.partition(":")
    with guarded.undisturbed():
        for _ in range(20):
            with socket.create_connection((host, int(port))) as connection:
                _pour(connection, noise)


def test_garbage_on_the_sockets_of_a_node_disturbs_nothing(guarded: Guarded) -> None:
    directories = {node: _sockets_of(guarded.job, node) for node in NODES}
    assert all(len(paths) >= 2 for paths in directories.values()), directories
    with guarded.undisturbed():
        for paths in directories.values():
            for path in paths:
                assert path.stat().st_mode & 0o777 == 0o600
                for noise in (b"\xff" * 8, _noise(100), _noise(1_000_000)):
                    with socket.socket(socket.AF_UNIX) as connection:
                        connection.connect(str(path))
                        _pour(connection, noise)
    refused = [e for n in NODES for e in guarded.job.agents[n][-1].named("connection_refused")]
    assert refused


def _sockets_of(job: LoopbackJob, node: str) -> list[Path]:
    base = Path(job.environment["XDG_RUNTIME_DIR"])
    return sorted(path for path in base.glob(f"*/*@{node}/*") if path.is_socket())


def _pour(connection: socket.socket, noise: bytes) -> None:
    connection.settimeout(5)
    with contextlib.suppress(OSError):
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


@pytest.mark.parametrize("mebibytes", [45, 70])
def test_a_message_that_is_too_large_is_refused(guarded: Guarded, mebibytes: int) -> None:
    """One is above the job's limit, one above what gRPC reads at all. A member sends them."""
    files = guarded.made
    credentials = grpc.ssl_channel_credentials(
        files.ca.read_bytes(), files.key(JOB).read_bytes(), files.certificate(JOB).read_bytes()
    )
    options = [
        ("grpc.ssl_target_name_override", f"{JOB}.job.elastic"),
        ("grpc.max_send_message_length", -1),
    ]
    with (
        guarded.undisturbed(),
        grpc.secure_channel(guarded.job.address, credentials, options) as channel,
    ):
        request = pb.StopRequest(reason="x" * (mebibytes << 20))
        with pytest.raises(grpc.RpcError) as caught:
            pb_grpc.ControlStub(channel).Stop(request, timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
