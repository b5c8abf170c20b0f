"""User and password for etcd are given together, from one place, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.errors import ConfigurationError
from elastic.settings.operator import OperatorSettings
from elastic.settings.store import StoreSettings, etcd_password
from tests.unit.settings.loading import ETCD, load, problem

PASSWORD = {"ELASTIC_ETCD_PASSWORD": "hunter2"}


def store(**given: object) -> StoreSettings:
    loaded: StoreSettings = load(OperatorSettings, {**ETCD, "etcd_user": "u", **given}).store
    return loaded


def test_the_password_is_read_from_the_environment_and_not_shown() -> None:
    settings = load(OperatorSettings, {**ETCD, "etcd_user": "u"}, PASSWORD)
    assert etcd_password(settings.store) == "hunter2"
    assert "hunter2" not in repr(settings)


def test_the_password_is_read_from_a_file_with_its_spaces(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(" with spaces \r\n")
    assert etcd_password(store(etcd_password_file=file)) == " with spaces "


def test_there_is_no_password_by_default() -> None:
    assert etcd_password(load(OperatorSettings).store) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file or directory"), (b"\n", "it is empty"), (b"hunter2\xff", "is not UTF-8")],
)
def test_a_bad_password_file_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError) as raised:
        etcd_password(store(etcd_password_file=file))
    text = str(raised.value)
    assert all(part in text for part in (str(file), "--etcd-password-file", reason))
    assert "hunter2" not in text


def test_an_empty_password_is_refused_and_not_shown() -> None:
    line = problem(OperatorSettings, {**ETCD, "etcd_user": "u"}, {"ELASTIC_ETCD_PASSWORD": ""})
    assert line == (
        "ELASTIC_ETCD_PASSWORD (environment): the value (not shown) is not allowed; "
        "expected text that is not empty"
    )


def test_a_password_on_the_command_line_is_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        load(OperatorSettings, {**ETCD, "etcd_user": "u", "etcd_password": "hunter2"})


def test_user_and_password_are_required_together() -> None:
    assert problem(OperatorSettings, {**ETCD, "etcd_user": "u"}) == (
        "--etcd-user also needs --etcd-password-file or ELASTIC_ETCD_PASSWORD"
    )
    assert problem(OperatorSettings, ETCD, PASSWORD) == (
        "ELASTIC_ETCD_PASSWORD also needs --etcd-user"
    )
    both = {**ETCD, "etcd_user": "u", "etcd_password_file": "/p"}
    assert problem(OperatorSettings, both, PASSWORD) == (
        "--etcd-password-file and ELASTIC_ETCD_PASSWORD cannot be used together; remove one"
    )


def test_certificate_and_key_are_required_together() -> None:
    assert problem(OperatorSettings, {**ETCD, "etcd_cert": "c"}) == (
        "--etcd-cert also needs --etcd-key"
    )
    assert problem(OperatorSettings, ETCD, {"ELASTIC_ETCD_KEY": "k"}) == (
        "ELASTIC_ETCD_KEY also needs --etcd-cert"
    )
    assert store(etcd_cert="c", etcd_key="k", etcd_password_file="/p").etcd_key == Path("k")
