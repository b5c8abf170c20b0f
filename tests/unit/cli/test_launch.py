"""A script that does not import elastic is classic: it starts as torchrun starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.cli.launch import is_classic, require_command
from elastic.errors import ConfigurationError
from elastic.settings.shared import Launch


def written(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        path = directory / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return directory / "train.py"


@pytest.mark.parametrize(
    ("text", "classic"),
    [
        ("", True),
        ("import torch", True),
        ("import elastic", False),
        ("import torch, elastic as e", False),
        ("from elastic import init", False),
        ("import elastic.errors", False),
        ("def main():\n    import elastic", False),
        ("import elasticsearch", True),
        ("# import elastic", True),
        ("'''import elastic'''", True),
        ("from . import elastic", True),
        ("this is no Python", False),
        ("\0", False),
    ],
)
def test_only_a_script_without_elastic_is_classic(tmp_path: Path, text: str, classic: bool) -> None:
    assert is_classic(written(tmp_path, train=text), Launch.AUTO) is classic


@pytest.mark.parametrize(
    "files",
    [
        {"train": "import toy", "toy": "import elastic"},
        {"train": "from toy import Toy", "toy": "from elastic import init"},
        {"train": "import a", "a": "import b", "b": "import a\nimport elastic"},
        {"train": "from pkg import toy", "pkg/toy": "import elastic"},
        {"train": "import pkg.toy", "pkg/toy": "import elastic"},
        {"train": "import pkg", "pkg/__init__": "from .toy import x", "pkg/toy": "import elastic"},
    ],
)
def test_imports_of_modules_beside_the_script_count(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert not is_classic(tmp_path / "train.py", Launch.AUTO)
    (tmp_path / "train.py").write_text("")
    assert is_classic(tmp_path / "train.py", Launch.AUTO)


def test_the_launch_setting_overrides_the_imports(tmp_path: Path) -> None:
    script = written(tmp_path, train="import elastic")
    assert is_classic(script, Launch.TORCHRUN)
    assert not is_classic(written(tmp_path, train=""), Launch.ELASTIC)


def test_a_current_directory_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = written(tmp_path, train="import torch")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigurationError, match="the current directory is gone"):
        require_command([str(script)])
