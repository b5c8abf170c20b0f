"""`elastic doctor` as users run it: it reports no fault of good nodes, and each planted fault."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import elastic
from tests.certificates import make_certificates, sign_for_job
from tests.etcd_cluster import EtcdCluster, etcd_cluster, free_ports
from tests.etcd_front import etcd_front
from tests.hosts.ability import require_hosts
from tests.hosts.host import Host
from tests.hosts.namespaces import ip
from tests.hosts.network import Network, network
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import Place
from tests.job_process import DIE_WITH_PARENT, ROOT, CommandProcess
from tests.wall_clock import WallClock

Report = dict[str, Any]
GOOD_WITHIN_S = 10.0
DOCTOR = (sys.executable, "-m", "elastic.cli", "doctor", "--output", "json")


def report_of(text: str) -> Report:
    found: Report = json.loads(text)
    assert found["checks"]
    for check in found["checks"]:
        assert bool(check["fault"]) == bool(check["remedy"])
    return found


def faults(report: Report) -> set[str]:
    return {check["fault"] for check in report["checks"] if check["fault"]}


def examined_here(
    *options: str | Path, timeout_s: float = 90.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a doctor on this machine to its end."""
    return subprocess.run(
        [*DIE_WITH_PARENT, *DOCTOR, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | environment,
    )


@pytest.mark.alone  # the test limits its time
def test_a_good_node_has_no_fault_and_the_doctor_leaves_nothing(tmp_path: Path) -> None:
    with etcd_cluster(size=1) as etcd, etcd_front(etcd.members[0].address) as front:
        options = ("--etcd", front, "--checkpoint-dir", tmp_path / "c")
        done = examined_here(*options, XDG_RUNTIME_DIR=str(tmp_path))
        assert etcd.ctl("get", "", "--prefix") == ""
    assert (done.returncode, done.stderr) == (0, "")
    report = report_of(done.stdout)
    assert faults(report) == set(), report
    assert (report["result"], report["exit_code"]) == ("ok", 0)
    assert {"versions", "disk", "etcd", "checkpoints", "torch"} <= {
        check["check"] for check in report["checks"]
    }
    assert os.listdir(tmp_path / "c") == []
    print(f"a good node took {report['took_s']} s")
    assert report["took_s"] <= GOOD_WITHIN_S


# ---- planted faults, on hosts of tests/hosts

long = pytest.mark.long


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    require_hosts()
    with network("a", "b", "c") as made:
        yield made


@pytest.fixture(scope="module")
def etcd(net: Network) -> Iterator[EtcdCluster]:
    with etcd_cluster(machines=net.hosts[:1]) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _healed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "net" in request.fixturenames:
        request.getfixturevalue("net").heal()


def examined(
    host: Host,
    *options: str | Path,
    before: Sequence[str | Path] = (),
    environment: dict[str, str] | None = None,
) -> Report:
    """Run one doctor to its end. `before` is a command that gets the doctor's as its arguments."""
    process = host.start(*before, *DOCTOR, *options, environment=environment)
    return finished(process)


def finished(process: CommandProcess) -> Report:
    code = process.wait()
    report = report_of("\n".join(process.output))
    assert process.messages == [], "no word beside the report"
    assert code == report["exit_code"]
    return report


def both(
    hosts: Sequence[Host],
    *options: str | Path,
    own: Callable[[Host], Sequence[str | Path]] = lambda _: (),
    environment: Callable[[Host], dict[str, str]] = lambda _: {},
) -> list[Report]:
    """Run a doctor on each of the hosts at the same time."""
    peers = ",".join(host.address for host in hosts)
    started = [
        host.start(
            *DOCTOR, "--insecure", "--peers", peers, *options, *own(host),
            environment=environment(host),
        )
        for host in hosts
    ]  # fmt: skip
    return [finished(process) for process in started]


def in_mounts(script: str) -> list[str]:
    """Return a command that runs its arguments with mounts of their own, made by the script."""
    return ["unshare", "--mount", "sh", "-ec", f'{script}; exec "$@"', "sh"]


@long
def test_good_nodes_have_no_fault_and_take_little_time(net: Network, tmp_path: Path) -> None:
    shared = ["--checkpoint-dir", tmp_path / "c", "--worker-port-range", "30000-30009"]
    for report in both(net.hosts[:2], *shared, "--peer-timeout-s", "20"):
        assert faults(report) <= {"network-slow"}, report  # on busy cores
        assert "all-reduce" in {check["check"] for check in report["checks"]}
        assert report["took_s"] < 3 * GOOD_WITHIN_S  # others use the cores; docs/DOCTOR.md
    assert os.listdir(tmp_path / "c") == []


@long
@pytest.mark.parametrize(
    ("fault", "before"),
    [
        ("open-files-low", ["prlimit", "--nofile=256:4096"]),
        ("shm-small", in_mounts("mount -t tmpfs -o size=64m tmpfs /dev/shm")),
        ("disk-full", in_mounts("mount -t tmpfs -o size=1m tmpfs {place}")),
        ("not-writable", in_mounts("mount -t tmpfs -o ro tmpfs {place}")),
    ],
)
def test_the_fault_of_a_machine_that_lacks_a_resource_is_named(
    net: Network, tmp_path: Path, fault: str, before: list[str]
) -> None:
    place = tmp_path / "logs"
    place.mkdir()
    command = [part.replace("{place}", str(place)) for part in before]
    report = examined(net.host("a"), "--log-dir", place, before=command)
    assert faults(report) == {fault}


@long
def test_a_read_only_checkpoint_directory_is_reported(net: Network, tmp_path: Path) -> None:
    place = tmp_path / "c"
    place.mkdir()
    command = in_mounts(f"mount -t tmpfs -o ro tmpfs {place}")
    report = examined(net.host("a"), "--checkpoint-dir", place, before=command)
    assert faults(report) == {"checkpoint-unusable", "not-writable"}
    assert report["exit_code"] == 78


@long
def test_an_old_package_and_a_broken_one_are_reported(net: Network, tmp_path: Path) -> None:
    old = tmp_path / "grpcio-1.50.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: grpcio\nVersion: 1.50.0\n")
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text('raise ImportError("libcudart.so.13: not found")\n')
    path = f"{tmp_path}:{ROOT}"
    report = examined(net.host("a"), environment={"PYTHONPATH": path})
    assert faults(report) == {"package-version", "torch-unusable"}
    told = {check["fault"]: check for check in report["checks"]}
    assert "libcudart" in told["torch-unusable"]["found"]
    assert "grpcio>=1.76" in told["package-version"]["remedy"]


@long
@pytest.mark.parametrize(
    ("fault", "days", "job"),
    [
        ("certificate-unusable", -1, "j"),
        ("certificate-unusable", 90, "k"),
        ("certificate-expires", 2, "j"),
    ],
)
def test_an_unusable_or_expiring_certificate_is_reported(
    net: Network, tmp_path: Path, fault: str, days: int, job: str
) -> None:
    files = sign_for_job(make_certificates(tmp_path / "tls"), job, days=days)
    report = examined(
        net.host("a"), "--job", "j", "--tls-ca", str(files.ca),
        "--tls-cert", str(files.certificate), "--tls-key", str(files.key),
    )  # fmt: skip
    assert faults(report) == {fault}


@long
def test_a_node_host_of_another_machine_is_reported(net: Network) -> None:
    report = examined(net.host("a"), "--node-host", net.host("b").address)
    assert faults(report) == {"address-not-own"}


@long
def test_an_old_etcd_and_an_unreachable_one_are_reported(net: Network, etcd: EtcdCluster) -> None:
    a = net.host("a")
    real = etcd.members[0].address
    report = examined(a, "--etcd", f"{real},{a.address}:9", "--fail-on", "error")
    assert faults(report) == {"etcd-too-old", "etcd-unreachable"}
    assert report["exit_code"] == 78
    report = examined(a, "--etcd", f"{a.address}:9")
    assert (faults(report), report["exit_code"]) == ({"etcd-unreachable"}, 75)
    assert faults(examined(a, "--etcd", "nowhere.invalid:2379")) == {
        "etcd-unreachable",
        "name-server-silent",
    }


@long
def test_a_slow_etcd_is_reported() -> None:
    with (
        etcd_cluster(size=1) as cluster,
        etcd_front(cluster.members[0].address, delay_s=0.15) as front,
    ):
        done = examined_here("--etcd", front, "--fail-on", "warning")
    assert faults(report_of(done.stdout)) == {"etcd-slow"}
    assert done.returncode == 78


@long
def test_an_etcd_without_space_and_one_that_wants_a_user_are_reported() -> None:
    with etcd_cluster("--quota-backend-bytes=400000", size=1) as cluster:
        address = cluster.members[0].address
        cluster.fill()
        found = report_of(examined_here("--etcd", address).stdout)
        assert faults(found) == {"etcd-too-old", "etcd-alarm"}
        cluster.make_space()
        cluster.ctl("user", "add", "root:secret")
        cluster.ctl("user", "grant-role", "root", "root")
        cluster.ctl("auth", "enable")
        found = report_of(examined_here("--etcd", address).stdout)
        assert "etcd-refuses" in faults(found)


def another_release(folder: Path) -> None:
    """Copy the package, as another release, to the folder."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(elastic.__file__).parent, folder / "elastic", ignore=skipped)
    version = folder / "elastic" / "version.py"
    version.write_text(version.read_text().replace('"0.', '"7.'))


@pytest.mark.long
@pytest.mark.parametrize("other", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_leader_of_another_release_is_reported(place: Place, tmp_path: Path, other: bool) -> None:
    path: dict[str, Any] = {}
    if other:
        another_release(tmp_path / "other")
        path = {"PYTHONPATH": str(tmp_path / "other"), "PYTHONSAFEPATH": "1"}
    with contextlib.closing(LoopbackJob(place, ("none.py",), etcd="unused")) as job:
        job.start_coordinator("--store", "memory")
        job.wait(lambda: job.events("elected"), "a leader")
        options = ("--etcd", job.address, "--job", "loopback")
        report = report_of(examined_here(*options, **path).stdout)
    (leader,) = [check for check in report["checks"] if check["check"] == "coordinator"]
    assert leader["fault"] == ("release-differs" if other else None), report


@long
def test_a_leader_that_does_not_answer_is_reported(net: Network, etcd: EtcdCluster) -> None:
    a = net.host("a")
    leader = {"candidate": "x", "address": f"{a.address}:9", "run_id": "default"}
    etcd.ctl("put", "elastic/lost/leader", json.dumps(leader), machine=a)
    endpoint = etcd.members[0].address
    report = examined(a, "--etcd", endpoint, "--job", "lost", "--insecure")
    assert faults(report) == {"etcd-too-old", "coordinator-unreachable"}


@long
def test_a_node_without_a_doctor_and_one_cut_off_are_told_apart(net: Network) -> None:
    a, b, c = net.hosts
    net.cut(b)
    peers = ["--insecure", "--peers", f"{a.address},{b.address},{c.address}"]
    report = examined(a, *peers, "--peer-timeout-s", "5")
    assert faults(report) == {"peer-silent", "peer-absent"}
    assert report["exit_code"] == 75


@long
def test_worker_ports_that_a_firewall_blocks_are_reported(net: Network) -> None:
    a, b, _ = net.hosts
    kept = "ipproto tcp dport 30000-30009"
    rules = [f"iif {x.name} to {y.subnet} {kept}" for x, y in ((a, b), (b, a))]
    ip(net.router, *(f"rule add blackhole {rule}" for rule in rules))
    try:
        reports = both([a, b], "--worker-port-range", "30000-30009")
    finally:
        ip(net.router, *(f"rule delete blackhole {rule}" for rule in rules))
    assert all("port-blocked" in faults(report) for report in reports), reports


@long
def test_an_interface_that_gloo_does_not_find_fails_the_all_reduce(net: Network) -> None:
    a, b, _ = net.hosts
    wrong = {"GLOO_SOCKET_IFNAME": "eth9"}
    reports = both([a, b], environment=lambda h: wrong if h is b else {})
    assert all(faults(report) == {"all-reduce-failed"} for report in reports), reports


@long
def test_a_wrong_clock_is_reported_on_both_nodes(net: Network, tmp_path: Path) -> None:
    a, b, _ = net.hosts
    clock = WallClock(tmp_path / "clock")
    clock.set(-120)
    first, second = both([a, b], environment=lambda h: clock.environment if h is b else {})
    assert "clock-differs" in faults(first)
    assert "clock-differs" in faults(second)
    (told,) = [check for check in first["checks"] if check["fault"] == "clock-differs"]
    assert "behind" in told["found"]
    assert told["result"] == "error"


@long
def test_nodes_that_differ_in_release_or_storage_are_reported(net: Network, tmp_path: Path) -> None:
    a, b, _ = net.hosts
    another_release(tmp_path / "other")
    old = tmp_path / "other" / "torch-2.6.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n")
    path = {"PYTHONPATH": str(tmp_path / "other"), "PYTHONSAFEPATH": "1"}
    reports = both(
        [a, b],
        own=lambda h: ["--checkpoint-dir", tmp_path / f"only-{h.name}"],
        environment=lambda h: path if h is b else {},
    )
    for report in reports:
        named = faults(report) - {"network-slow"}
        assert named == {"release-differs", "torch-differs", "checkpoint-not-shared"}, report


@long
def test_a_doctor_address_in_use_is_an_error_and_no_finding() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        options = ("--peers", "localhost", "--doctor-address", f"127.0.0.1:{port}")
        done = examined_here(*options, timeout_s=60.0)
    assert done.returncode == 78
    assert "--doctor-address" in done.stderr
