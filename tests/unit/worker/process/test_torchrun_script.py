"""Which failure the end of a script written for torchrun becomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from elastic.core.membership import FailureKind
from elastic.worker.process.torchrun import failure_of


def test_a_script_ended_by_a_signal_is_a_failure_by_signal(tmp_path: Path) -> None:
    failure = failure_of("w", -9, tmp_path / "none.json")
    assert (failure.kind, failure.code) == (FailureKind.SIGNAL, 9)


def test_torchs_record_becomes_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    try:
        raise ValueError("no such corpus")
    except ValueError as error:
        ErrorHandler().record_exception(error)
    failure = failure_of("w", 1, path)
    assert (failure.kind, failure.code) == (FailureKind.EXCEPTION, 1)
    assert failure.message == "ValueError: no such corpus"
    assert "test_torchrun_script.py" in failure.traceback
    assert failure.retryable


def test_the_message_is_the_first_line_of_what_torch_records(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    recorded = {"message": "RuntimeError: no memory\nTried to allocate 2 GiB", "errorCode": 1}
    path.write_text(json.dumps({"message": recorded}))
    assert failure_of("w", 1, path).message == "RuntimeError: no memory"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"message": 3}', '{"message": {}}', '{"message": null}', '"text"'],
)
def test_an_unreadable_record_gives_a_failure_by_exit_code(tmp_path: Path, content: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    failure = failure_of("w", 3, path)
    assert (failure.kind, failure.code) == (FailureKind.EXIT_CODE, 3)
    assert "3" in failure.message


def test_a_recorded_configuration_error_is_not_retryable(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "ConfigurationError: no", "errorCode": 78}}))
    assert not failure_of("w", 78, path).retryable


def test_exit_code_78_without_a_record_is_retryable(tmp_path: Path) -> None:
    assert failure_of("w", 78, tmp_path / "none.json").retryable
