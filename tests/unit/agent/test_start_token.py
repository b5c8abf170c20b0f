"""An agent that is started again in its directory is recognised by its start token."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from elastic.agent.registration import next_start, start_token
from elastic.errors import ConfigurationError, TransientError
from elastic.rpc.identity import proves_start


def test_a_start_token_is_kept_and_private(tmp_path: Path) -> None:
    token = start_token(tmp_path)
    assert start_token(tmp_path) == token
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_each_directory_has_a_start_token_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert start_token(tmp_path / "a") != start_token(tmp_path / "b")


def test_a_start_token_says_nothing_about_its_secret(tmp_path: Path) -> None:
    token, secret = start_token(tmp_path)
    assert secret == (tmp_path / "start-token").read_text()
    assert secret not in token
    assert proves_start(token, secret)
    assert not any(proves_start(token, other) for other in ("", token, secret[:-1], "0" * 64))


def test_the_token_of_an_earlier_version_is_kept(tmp_path: Path) -> None:
    earlier = "0f" * 16
    (tmp_path / "start-token").write_text(earlier)
    assert start_token(tmp_path) == (earlier, "")
    assert proves_start(earlier, "")


@pytest.mark.parametrize("damage", [b"", b"00", b"\xff\xfe", b"not hexadecimal"])
def test_a_damaged_start_token_is_replaced(tmp_path: Path, damage: bytes) -> None:
    before = start_token(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    after = start_token(tmp_path)
    assert after != before
    assert start_token(tmp_path) == after


def test_a_token_in_a_missing_directory_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere/start-token: No such file"):
        start_token(tmp_path / "nowhere")


def test_starts_are_counted_for_each_directory(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert [next_start(tmp_path / "a") for _ in range(3)] == [1, 2, 3]
    assert next_start(tmp_path / "b") == 1


@pytest.mark.parametrize("damage", [b"", b"x", b"\xff"])
def test_no_number_is_repeated_after_a_damaged_count(tmp_path: Path, damage: bytes) -> None:
    before = {next_start(tmp_path) for _ in range(3)}
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    first, second = next_start(tmp_path), next_start(tmp_path)
    assert second == first + 1
    assert first > max(before)


def test_a_count_that_cannot_be_kept_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere/starts: No such file"):
        next_start(tmp_path / "nowhere")


def test_a_full_disk_is_a_transient_error_of_a_start_and_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_start(tmp_path)

    def full(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(
            TransientError, match="starts: No space left on device; free space there"
        ):
            next_start(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["starts"]
    assert next_start(tmp_path) == 2
