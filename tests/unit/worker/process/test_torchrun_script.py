"""How the end of a script written for torchrun is understood."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from elastic.core.membership import FailureKind
from elastic.worker.process.torchrun import failure_of


def test_a_signal_is_a_signal_whatever_was_written(tmp_path: Path) -> None:
    failure = failure_of("w", -9, tmp_path / "none.json")
    assert (failure.kind, failure.code) == (FailureKind.SIGNAL, 9)


def test_what_torch_records_is_the_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_first_line_of_what_torch_records_is_the_message(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    recorded = {"message": "RuntimeError: no memory\nTried to allocate 2 GiB", "errorCode": 1}
    path.write_text(json.dumps({"message": recorded}))
    assert failure_of("w", 1, path).message == "RuntimeError: no memory"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"message": 3}', '{"message": {}}', '{"message": null}', '"text"'],
)
def test_what_cannot_be_read_leaves_the_exit_code(tmp_path: Path, content: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    failure = failure_of("w", 3, path)
    assert (failure.kind, failure.code) == (FailureKind.EXIT_CODE, 3)
    assert "3" in failure.message


def test_an_error_of_configuration_is_not_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "ConfigurationError: no", "errorCode": 78}}))
    assert not failure_of("w", 78, path).retryable


def test_an_exit_code_alone_says_nothing_of_configuration(tmp_path: Path) -> None:
    assert failure_of("w", 78, tmp_path / "none.json").retryable
