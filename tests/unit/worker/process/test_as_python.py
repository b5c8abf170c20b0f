"""What a script finds as under plain Python."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic.worker.process import as_python


@pytest.mark.parametrize(
    ("safe_path", "path"), [(False, ["/scripts", "/first", "/last"]), (True, ["/first", "/last"])]
)
def test_what_lies_beside_the_script_is_imported_unless_that_is_not_wanted(
    safe_path: bool, path: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ["/first", "/last"]
    flags = SimpleNamespace(safe_path=safe_path)
    monkeypatch.setattr(as_python, "sys", SimpleNamespace(path=found, flags=flags))
    as_python.look_beside("/scripts/train.py")
    assert found == path
