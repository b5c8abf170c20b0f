"""The checks of `elastic doctor`: which finding of a probe is which fault, at which threshold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.cli.doctor import document, exit_code
from elastic.doctor import checks
from elastic.doctor.checks import Fault, Result, Verdict, worst
from elastic.doctor.findings import (
    Accelerator,
    AllReduce,
    Certificate,
    CheckpointSpeed,
    Coordinator,
    Directory,
    EtcdMember,
    OpenFiles,
    Package,
    Peer,
    Resolution,
    SharedMemory,
)
from elastic.settings.doctor import FailOn

DOCUMENT = Path(__file__).parents[3] / "docs" / "DOCTOR.md"
MIB, GIB = 2**20, 2**30
DAY_S = 86_400.0


def judged(found: Any) -> list[Verdict]:
    match found:
        case Package():
            return list(checks.packages([found]))
        case Resolution():
            return [checks.resolution(found)]
        case Directory():
            return [checks.directory(found)]
        case SharedMemory():
            return [checks.shared_memory(found)]
        case OpenFiles():
            return [checks.open_files(found)]
        case CheckpointSpeed():
            return [checks.checkpoint_speed(found)]
        case Certificate():
            return list(checks.certificate(found))
        case EtcdMember():
            return list(checks.etcd_member(found))
        case Coordinator():
            return [checks.coordinator(found, release="0.1")]
        case Peer():
            return list(checks.peer(found, elastic="0.1.0", torch="2.13.0"))
        case Accelerator():
            return list(checks.accelerator(found))
        case AllReduce():
            return [checks.all_reduce(found)]
    raise AssertionError(found)


def disk(**fields: Any) -> Directory:
    return Directory(**{"path": "/x", "of": "logs", "free_bytes": 9 * GIB, **fields})


def member(**fields: Any) -> EtcdMember:
    good = {"endpoint": "http://e:2379", "version": "3.5.23", "commit_s": (0.01,) * 5}
    return EtcdMember(**(good | fields))


def neighbour(**fields: Any) -> Peer:
    good = {"address": "b:1", "node": "b", "elastic": "0.1.7", "torch": "2.13.0"}
    return Peer(**(good | {"worker_port": 7} | fields))


def certificate(**fields: Any) -> Certificate:
    return Certificate(**{"path": "j.pem", "not_after_s": 90 * DAY_S, **fields})


def checkpoint(write_s: float = 0.1, **fields: Any) -> CheckpointSpeed:
    good = {"url": "/c", "size_bytes": 64 * MIB, "write_s": write_s, "read_s": 0.1}
    return CheckpointSpeed(**(good | fields))


GOOD = [
    Package(name="torch", found="2.13.0+cpu", at_least="2.6"),
    Package(name="protobuf", found="6.33.6", at_least="6.31", below="8"),
    Resolution(name="e", of="etcd", addresses=("10.0.0.1",), took_s=0.02),
    disk(),
    disk(free_inodes=100_000),
    SharedMemory(size_bytes=8 * GIB, free_bytes=8 * GIB, workers=8),
    OpenFiles(soft=1024, hard=524_288),
    checkpoint(),
    certificate(),
    member(),
    member(version="3.6.5"),
    member(size_bytes=GIB - 1, used_bytes=MIB),
    member(size_bytes=GIB, used_bytes=GIB, quota_bytes=8 * GIB),
    member(version="3.7.0"),
    member(version="elastic 1.2.3", in_memory=True),
    Coordinator(),
    Coordinator(address="c:29400"),
    neighbour(),
    neighbour(sees_checkpoint=True),
    neighbour(clock_ahead_s=0.4, clock_error_s=0.0),
    neighbour(clock_ahead_s=-2.0, clock_error_s=1.9),
    Peer(address="a", is_self=True),
    Accelerator(torch="2.13.0"),
    Accelerator(torch="2.13.0", cuda="13.0", device_files=2, devices=("H200",) * 2, workers=2),
    Accelerator(torch="2.13.0", cuda="13.0", devices=("H200",), nccl="2.28.9"),
    AllReduce(nodes=2, bytes_per_s=200.0 * MIB),
]
W, E = Result.WARNING, Result.ERROR
FAULTY = [
    (Package(name="torch", found=None, at_least="2.6"), Fault.PACKAGE_VERSION, E),
    (Package(name="torch", found="2.5.1", at_least="2.6"), Fault.PACKAGE_VERSION, E),
    (Package(name="protobuf", found="8.0", below="8"), Fault.PACKAGE_VERSION, E),
    (Resolution(name="e", of="etcd", error="no such name"), Fault.NAME_UNKNOWN, E),
    (Resolution(name="e", of="etcd", error="?", silent=True), Fault.NAME_SERVER_SILENT, E),
    (Resolution(name="e", of="etcd", addresses=("::1",), took_s=1.0), Fault.NAME_SLOW, W),
    (disk(free_bytes=256 * MIB - 1), Fault.DISK_FULL, E),
    (disk(free_inodes=999), Fault.DISK_FULL, E),
    (disk(free_bytes=5 * GIB - 1), Fault.DISK_LOW, W),
    (disk(error="Read-only file system"), Fault.NOT_WRITABLE, E),
    (SharedMemory(size_bytes=64 * MIB, free_bytes=64 * MIB, workers=1), Fault.SHM_SMALL, E),
    (SharedMemory(size_bytes=GIB, free_bytes=GIB, workers=3), Fault.SHM_SMALL, W),
    (OpenFiles(soft=1023, hard=4096), Fault.OPEN_FILES_LOW, E),
    (checkpoint(error="no", advice="mend it"), Fault.CHECKPOINT_UNUSABLE, E),
    (checkpoint(write_s=4.0), Fault.CHECKPOINT_SLOW, W),
    (certificate(error="it expired; replace it"), Fault.CERTIFICATE_UNUSABLE, E),
    (certificate(distrusted="unknown"), Fault.CERTIFICATE_UNUSABLE, E),
    (certificate(not_after_s=6.9 * DAY_S), Fault.CERTIFICATE_EXPIRES, W),
    (certificate(exposed_key="j.key"), Fault.KEY_EXPOSED, W),
    (member(error="no answer", unreachable=True), Fault.ETCD_UNREACHABLE, E),
    (member(error="permission denied"), Fault.ETCD_REFUSES, E),
    (member(version="elastic 1.2.3", in_memory=True, alone=False), Fault.ETCD_REFUSES, E),
    (member(version="3.5.22"), Fault.ETCD_TOO_OLD, E),
    (member(version="3.6.4"), Fault.ETCD_TOO_OLD, E),
    (member(version="3.4.30"), Fault.ETCD_TOO_OLD, E),
    (member(version=""), Fault.ETCD_TOO_OLD, E),
    (member(errors=("memberID:1 alarm:NOSPACE ",)), Fault.ETCD_ALARM, E),
    (member(size_bytes=GIB, used_bytes=MIB), Fault.ETCD_FILLING, W),
    (member(size_bytes=3 * GIB, used_bytes=MIB), Fault.ETCD_FILLING, W),  # it may have more
    (member(size_bytes=4 * GIB, quota_bytes=8 * GIB), Fault.ETCD_FILLING, W),
    (member(size_bytes=8 * GIB, quota_bytes=8 * GIB), Fault.ETCD_FILLING, E),
    (member(commit_s=(0.01, 0.2, 0.3)), Fault.ETCD_SLOW, W),
    (member(commit_s=(0.6,)), Fault.ETCD_SLOW, E),
    (Coordinator(address="c:1", error="no answer"), Fault.COORDINATOR_UNREACHABLE, E),
    (Coordinator(address="c:1", version="0.2.0"), Fault.RELEASE_DIFFERS, E),
    (Peer(address="b", error="no answer"), Fault.PEER_SILENT, E),
    (Peer(address="b", error="nothing listens", refused=True), Fault.PEER_ABSENT, E),
    (neighbour(elastic="0.2.0"), Fault.RELEASE_DIFFERS, E),
    (neighbour(torch="2.12.0"), Fault.TORCH_DIFFERS, W),
    (neighbour(clock_ahead_s=-1.0, clock_error_s=0.1), Fault.CLOCK_DIFFERS, W),
    (neighbour(clock_ahead_s=3600.0, clock_error_s=0.1), Fault.CLOCK_DIFFERS, E),
    (neighbour(worker_port_error="no answer"), Fault.PORT_BLOCKED, E),
    (neighbour(sees_checkpoint=False), Fault.CHECKPOINT_NOT_SHARED, E),
    (Accelerator(error="no module"), Fault.TORCH_UNUSABLE, E),
    (Accelerator(torch="2.13.0+cpu", device_files=8), Fault.GPU_UNUSED, E),
    (Accelerator(torch="2.13.0", cuda="13.0", device_files=8), Fault.GPU_UNUSED, E),
    (Accelerator(torch="2", cuda="13.0", devices=("H200",), workers=2), Fault.GPU_MISSING, E),
    (
        Accelerator(torch="2", cuda="13.0", devices=("H200",), device_errors=("GPU 0: ECC",)),
        Fault.GPU_FAULTY,
        E,
    ),
    (Accelerator(torch="2", devices=("H200",), nccl="2.28.3"), Fault.NCCL_FAULTY, E),
    (Accelerator(torch="2", devices=("H200",), nccl="2.28.8"), Fault.NCCL_FAULTY, E),
    (
        Accelerator(torch="2", devices=("H200",), nccl="2.29.1", nccl_error="unhandled"),
        Fault.NCCL_FAULTY,
        E,
    ),
    (AllReduce(nodes=2, error="timed out"), Fault.ALL_REDUCE_FAILED, E),
    (AllReduce(nodes=2, error="timed out", stalled_bytes=MIB), Fault.NETWORK_SLOW, E),
    (AllReduce(nodes=2, bytes_per_s=99.0 * MIB), Fault.NETWORK_SLOW, W),
]
ELSEWHERE = {Fault.ADDRESS_NOT_OWN, Fault.PROBE_HANGS}


@pytest.mark.parametrize("found", GOOD, ids=lambda f: type(f).__name__)
def test_a_good_finding_has_no_fault(found: Any) -> None:
    verdicts = judged(found)
    assert verdicts
    assert {v.fault for v in verdicts} == {None}


@pytest.mark.parametrize(("found", "fault", "result"), FAULTY)
def test_a_bad_finding_has_a_fault_and_a_remedy(found: Any, fault: Fault, result: Result) -> None:
    (verdict,) = [v for v in judged(found) if v.fault is not None]
    assert (verdict.fault, verdict.result) == (fault, result)
    assert len(verdict.remedy) > 5


def test_an_address_of_another_machine_is_an_error_and_an_unsure_one_a_warning() -> None:
    assert checks.own_address("a", "", unsure=False).fault is None
    wrong = checks.own_address("a", "another machine answers", unsure=False)
    doubt = checks.own_address("a", "no network yet", unsure=True)
    assert {wrong.fault, doubt.fault} == {Fault.ADDRESS_NOT_OWN}
    assert (wrong.result, doubt.result) == (E, W)


def test_every_fault_is_covered_by_these_tests() -> None:
    assert {fault for _, fault, _ in FAULTY} | ELSEWHERE == set(Fault)
    assert checks.hangs("disk", 15).fault is Fault.PROBE_HANGS


def rows() -> Iterator[str]:
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("| `"):
            yield line.split("`")[1]


def test_every_fault_is_documented_once() -> None:
    documented = list(rows())
    assert sorted(documented) == sorted(fault.value for fault in Fault)


# ---- the command's exit code and document

OK = Verdict(check="disk", subject="/x", found="9 GiB")
WRONG = {"check": "c", "subject": "s", "found": "f", "remedy": "mend it"}
WARNS = Verdict(**WRONG, result=W, fault=Fault.DISK_LOW)
FAILS = Verdict(**WRONG, result=E, fault=Fault.DISK_FULL)
PASSES = Verdict(**WRONG, result=E, fault=Fault.ETCD_UNREACHABLE, may_pass=True)


@pytest.mark.parametrize(
    ("verdicts", "fail_on", "code"),
    [
        ([], FailOn.WARNING, 0),
        ([OK], FailOn.WARNING, 0),
        ([OK, WARNS], FailOn.ERROR, 0),
        ([OK, WARNS], FailOn.WARNING, 78),
        ([FAILS], FailOn.ERROR, 78),
        ([PASSES], FailOn.ERROR, 75),
        ([PASSES, FAILS], FailOn.ERROR, 78),
        ([PASSES, WARNS], FailOn.ERROR, 75),
        ([PASSES, FAILS, WARNS], FailOn.NEVER, 0),
    ],
)
def test_verdicts_decide_the_exit_code(verdicts: list[Verdict], fail_on: FailOn, code: int) -> None:
    assert exit_code(verdicts, fail_on) == code


def test_the_document_has_the_worst_result_and_every_check() -> None:
    assert [worst(v) for v in ([], [OK], [OK, WARNS], [WARNS, FAILS])] == [
        Result.OK,
        Result.OK,
        W,
        E,
    ]
    said = document([OK, FAILS], node="n", took_s=1.234, code=78)
    assert (said["result"], said["exit_code"], said["took_s"]) == ("error", 78, 1.23)
    assert said["checks"][1]["fault"] == "disk-full"
    assert said["checks"][0] == {
        "check": "disk",
        "subject": "/x",
        "result": "ok",
        "fault": None,
        "found": "9 GiB",
        "remedy": None,
    }


def test_a_fault_without_a_remedy_raises_an_assertion_error() -> None:
    with pytest.raises(AssertionError):
        Verdict(check="c", subject="s", found="f", result=E, fault=Fault.DISK_FULL)
