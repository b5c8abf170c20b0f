"""The doctor's probes of this machine run on real packages, files and limits."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastic.checkpoint.directory import open_directory
from elastic.doctor import checks, examination
from elastic.doctor.checks import Fault
from elastic.doctor.findings import Package
from elastic.errors import TransientError
from tests.certificates import make_certificates, sign, sign_for_job


def test_the_requirements_of_elastic_are_installed() -> None:
    found = {package.name: package for package in examination.packages()}
    assert {"torch", "grpcio", "protobuf"} <= found.keys()
    assert "pytest" not in found, "an extra"
    assert "tomli" not in found, "for another Python"
    assert found["protobuf"].below == "8"
    assert all(verdict.fault is None for verdict in checks.packages(list(found.values())))


def test_an_older_package_is_found_by_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "grpcio-1.50.0.dist-info"
    planted.mkdir()
    (planted / "METADATA").write_text("Metadata-Version: 2.1\nName: grpcio\nVersion: 1.50.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = [package for package in examination.packages() if package.name == "grpcio"]
    assert found == Package(name="grpcio", found="1.50.0", at_least="1.76")


def test_a_name_resolves_or_is_reported_as_unknown() -> None:
    here = examination.resolve("localhost", "peer")
    assert "127.0.0.1" in here.addresses
    assert here.took_s < 5
    assert checks.resolution(examination.resolve("n" * 64, "peer")).fault is Fault.NAME_UNKNOWN


def test_a_missing_directory_is_examined_without_being_made(tmp_path: Path) -> None:
    found = examination.directory(tmp_path / "a" / "b", "logs")
    assert found.free_bytes > 0
    assert not found.error
    assert os.listdir(tmp_path) == []


def test_a_directory_below_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = examination.directory(tmp_path / "file" / "logs", "logs")
    assert checks.directory(found).fault is Fault.NOT_WRITABLE


def test_a_directory_that_the_system_refuses_to_look_for_is_not_writable(tmp_path: Path) -> None:
    found = examination.directory(tmp_path / ("n" * 300) / "logs", "logs")
    assert "File name too long" in found.error
    assert checks.directory(found).fault is Fault.NOT_WRITABLE


async def test_what_libraries_print_is_not_taken_for_the_answer_of_the_trial(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, types\n"
        "os.write(1, b'NCCL INFO cudaDriverVersion 13000\\n')\n"
        "print('NCCL version 2.27.5')\n"
        "__version__, version = '9.9', types.SimpleNamespace(cuda=None)\n"
    )
    trial = examination.TrialProcess()
    await trial.start({"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])})
    try:
        assert (await trial.receive(60.0))["torch"] == "9.9"
    finally:
        await trial.close()


def test_a_marker_is_found_though_the_storage_fails_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = open_directory(str(tmp_path))
    found, failures = directory.list, [TransientError("not now")]

    def list_names(relative: str = "") -> list[str]:
        if failures:
            raise failures.pop()
        return found(relative)

    monkeypatch.setattr(directory, "list", list_names)
    monkeypatch.setattr(examination, "open_directory", lambda _url: directory)
    marker, other = examination.Marker(str(tmp_path)), examination.Marker(str(tmp_path))
    assert marker.sees(other.name)
    assert not failures
    failures.extend([TransientError("not now")] * 1000)
    monkeypatch.setattr(examination, "_LOOK_S", 0.0)
    with pytest.raises(TransientError):
        marker.sees(other.name)
    failures.clear()
    assert not marker.sees("another directory's")
    for one in (marker, other):
        one.remove()
    assert os.listdir(tmp_path) == []


async def test_the_trial_answers_however_much_libraries_print(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import sys, types\n"
        "for n in range(20_000):\n"
        "    print(f'NCCL TRACE {n:06} ' + 40 * '.')\n"
        "sys.stdout.flush()\n"
        "if __import__('os').environ.get('FAILS'):\n"
        "    sys.exit('the last line')\n"
        "__version__, version = '9.9', types.SimpleNamespace(cuda=None)\n"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    trial, failing = examination.TrialProcess(), examination.TrialProcess()
    try:
        await trial.start(path)
        assert (await trial.receive(60.0))["torch"] == "9.9"
        await failing.start({**path, "FAILS": "1"})
        with pytest.raises(examination.TrialFailed, match=r"^the last line$"):
            await failing.receive(60.0)
    finally:
        await trial.close()
        await failing.close()


def test_a_checkpoint_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = examination.checkpoint_speed(str(tmp_path))
    assert not found.error
    assert found.size_bytes >= 2**20
    assert min(found.write_s, found.read_s) > 0
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_directory_below_a_file_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    verdict = checks.checkpoint_speed(examination.checkpoint_speed(str(tmp_path / "file" / "c")))
    assert verdict.fault is Fault.CHECKPOINT_UNUSABLE
    assert "is a file" in verdict.remedy


def test_the_directory_of_one_checkpoint_is_unusable(tmp_path: Path) -> None:
    one = tmp_path / "step-000000080"
    one.mkdir()
    (one / "manifest.json").write_text("{")
    verdict = checks.checkpoint_speed(examination.checkpoint_speed(str(one)))
    assert verdict.fault is Fault.CHECKPOINT_UNUSABLE
    assert str(tmp_path) in verdict.remedy


class _Slow(MemoryFileSystem):
    protocol = "slowmemory"

    def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return super().pipe_file(*args, **kwargs)

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if "w" in mode:
            time.sleep(0.2)
        return super().open(path, mode, *args, **kwargs)


def test_a_slow_checkpoint_directory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("slowmemory", _Slow, clobber=True)
    monkeypatch.setattr(examination, "_TRIED_BYTES", 2**20)
    found = examination.checkpoint_speed("slowmemory://c")
    assert not found.error
    assert checks.checkpoint_speed(found).fault is Fault.CHECKPOINT_SLOW


def faults_of(files: Any, job: str = "j") -> list[Fault | None]:
    return [verdict.fault for verdict in checks.certificate(examination.certificate(files, job))]


def test_expiring_expired_and_foreign_certificates_are_faults(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    assert faults_of(sign_for_job(made, "j", days=90)) == [None]
    assert faults_of(sign_for_job(made, "j", days=2)) == [Fault.CERTIFICATE_EXPIRES]
    files = sign_for_job(made, "j", days=-1)
    assert faults_of(files) == [Fault.CERTIFICATE_UNUSABLE]
    (verdict,) = checks.certificate(examination.certificate(files, "j"))
    assert "expired" in verdict.found
    assert "replace it" in verdict.remedy
    assert faults_of(sign_for_job(made, "k"), "j") == [Fault.CERTIFICATE_UNUSABLE]


def test_an_exposed_key_and_a_key_of_another_certificate_are_faults(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    files = sign_for_job(made, "j", days=90)
    assert files.key is not None
    files.key.chmod(0o644)
    assert faults_of(files) == [None, Fault.KEY_EXPOSED]
    sign(made, "other")
    made.key("other").rename(files.key)
    assert faults_of(files)[0] is Fault.CERTIFICATE_UNUSABLE


def test_a_certificate_not_signed_by_the_authority_is_unusable(tmp_path: Path) -> None:
    made, other = make_certificates(tmp_path / "a"), make_certificates(tmp_path / "b")
    files = sign_for_job(made, "j", days=90)
    files.ca.write_bytes(other.ca.read_bytes())  # type: ignore[union-attr]
    (verdict,) = checks.certificate(examination.certificate(files, "j"))
    assert verdict.fault is Fault.CERTIFICATE_UNUSABLE
    assert "the authority of --tls-ca does not verify it" in verdict.found


def test_the_limits_of_this_process_are_read() -> None:
    assert 0 < examination.open_files().soft <= examination.open_files().hard
    assert examination.shared_memory(3).workers == 3
