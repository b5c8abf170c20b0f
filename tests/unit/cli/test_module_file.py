"""`elastic run -m NAME` finds the file to run without importing anything, or refuses the name."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.cli.launch import is_classic, module_file, require_command
from elastic.errors import ConfigurationError
from elastic.settings.shared import Launch

_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h
_CAP_DAC = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is not on `sys.path` of this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)


def refused(name: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        require_command([name], module=True)
    return str(caught.value)


RAISES = "raise RuntimeError('imported')"
LAYOUTS = [
    ("train", {"train.py": RAISES}, "train.py"),
    ("my-train", {"my-train.py": ""}, "my-train.py"),
    ("pkg.train", {"pkg/__init__.py": RAISES, "pkg/train.py": RAISES}, "pkg/train.py"),
    ("pkg", {"pkg/__init__.py": "", "pkg/__main__.py": ""}, "pkg/__main__.py"),
    ("pkg.__main__", {"pkg/__init__.py": "", "pkg/__main__.py": ""}, "pkg/__main__.py"),
    ("spaces.a.b.train", {"spaces/a/b/train.py": ""}, "spaces/a/b/train.py"),
    ("spaces.a", {"spaces/a/__main__.py": ""}, "spaces/a/__main__.py"),
    ("train.py", {"train/__init__.py": "", "train/py.py": ""}, "train/py.py"),
    ("trace", {"trace.py": ""}, "trace.py"),  # the standard library has a module of this name, too
]


@pytest.mark.parametrize(("name", "files", "expected"), LAYOUTS)
def test_module_file_is_the_file_that_python_runs(
    here: Path, name: str, files: dict[str, str], expected: str
) -> None:
    write(here, files)
    require_command([name], module=True)
    assert module_file(name).path == here / expected
    told = "import sys; print(sys.modules['__main__'].__spec__.origin)"
    write(here, {path: told for path in files if path == expected})
    write(here, {path: "" for path in files if path != expected})
    ran = subprocess.run(
        [sys.executable, "-m", name], cwd=here, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == str(here / expected)


def test_a_module_on_the_path_is_examined(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(here, {"lib/pkg/__init__.py": "", "lib/pkg/train.py": "import elastic", "x.py": ""})
    monkeypatch.syspath_prepend(here / "lib")
    assert module_file("pkg.train").path == here / "lib/pkg/train.py"
    assert not is_classic("pkg.train", Launch.AUTO, module=True)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no PYTHONSAFEPATH")
def test_with_a_safe_path_a_module_of_the_working_directory_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here, {"train.py": ""})
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert "PYTHONSAFEPATH" in refused("train")


def test_a_module_in_a_zip_archive_is_accepted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(here / "all.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "")
        archive.writestr("zipped/train.py", "")
    monkeypatch.syspath_prepend(here / "all.zip")
    require_command(["zipped.train"], module=True)


def test_a_missing_module_is_refused_with_the_part_that_is_missing(here: Path) -> None:
    write(here, {"pkg/__init__.py": "", "single.py": ""})
    told = refused("nowhere.train")
    assert "the module 'nowhere.train' does not exist" in told
    assert f"no 'nowhere' in {here}" in told
    assert "PYTHONPATH" in told
    told = refused("pkg.trian")
    assert f"the package 'pkg' ({here / 'pkg'}) has no 'trian'" in told
    assert f"'single' ({here / 'single.py'}) is not a package" in refused("single.train")


def test_a_package_without_main_is_refused(here: Path) -> None:
    write(here, {"pkg/__init__.py": "", "pkg/train.py": "", "spaces/a.py": ""})
    told = refused("pkg")
    assert "the package 'pkg'" in told
    assert "has no __main__.py" in told
    assert "-m pkg.MODULE" in told
    assert "has no __main__.py" in refused("spaces")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("train.py", "'train'"),
        ("./train.py", "'train'"),
        ("pkg/train.py", "'pkg.train'"),
        ("pkg/train", "'pkg.train'"),
        ("missing.py", "'missing'"),
    ],
)
def test_a_path_instead_of_a_name_gives_the_name(here: Path, name: str, module: str) -> None:
    write(here, {"train.py": "", "pkg/train.py": ""})
    told = refused(name)
    assert repr(name) in told
    assert "leave out -m" in told
    assert module in told


@pytest.mark.parametrize(
    "name", ["", ".train", "pkg..train", "pkg.", "__main__", "/", "a\tb", ".."]
)
def test_an_invalid_module_name_is_refused(here: Path, name: str) -> None:
    write(here, {"pkg/__init__.py": "", "train.py": "", "__main__.py": ""})
    assert repr(name) in refused(name)


@pytest.mark.usefixtures("here")
def test_builtin_and_extension_modules_are_refused() -> None:
    assert "'sys'" in refused("sys")
    assert "'_ctypes'" in refused("_ctypes")


@contextlib.contextmanager
def modes_heeded() -> Iterator[None]:
    """Drop the capabilities by which root ignores file modes, for this thread and this block."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    before, without = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    without[:] = before[:]
    without[0] &= ~_CAP_DAC  # only effective ones: those permitted stay, to restore them
    assert libc.capset(header, without) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@pytest.mark.parametrize("which", ["train.py", "__init__.py"])
def test_a_file_without_read_permission_is_named(here: Path, which: str) -> None:
    write(here, {"pkg/__init__.py": "", "pkg/train.py": ""})
    (here / "pkg" / which).chmod(0)
    with modes_heeded():
        told = refused("pkg.train")
    assert str(here / "pkg" / which) in told
    assert "Permission denied" in told


@pytest.mark.parametrize("which", ["pkg/train.py", "pkg/__init__.py"])
def test_a_file_with_a_read_error_is_named(
    here: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(here, {"pkg/__init__.py": "", "pkg/train.py": ""})

    def get_data(_: object, path: str) -> bytes:
        if path == str(here / which):
            raise OSError(5, "Input/output error", path)
        return b""

    monkeypatch.setattr("importlib.machinery.SourceFileLoader.get_data", get_data)
    told = refused("pkg.train")
    assert "'pkg.train'" in told
    assert f"{here / which}: Input/output error" in told


def test_a_directory_that_cannot_be_listed_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "pkg").mkdir()

    def scandir(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", scandir)
    assert f"{here / 'pkg'}: Permission denied" in refused("pkg.train")


def test_no_module_name_is_suggested_for_an_absolute_or_parent_path(here: Path) -> None:
    assert "give the module's name" not in refused("../train.py")
    assert "give the module's name" not in refused(f"{here}/train.py")


# Whether a module is a script for torchrun (classic) or for elastic


@pytest.mark.parametrize(
    ("files", "classic"),
    [
        ({"pkg/train.py": "import torch"}, True),
        ({"pkg/train.py": "import elastic"}, False),
        ({"pkg/train.py": "from . import toy", "pkg/toy.py": "import elastic"}, False),
        ({"pkg/train.py": "from .toy import Toy", "pkg/toy.py": "import elastic"}, False),
        ({"pkg/train.py": "import toy", "pkg/toy.py": "import elastic"}, True),
        ({"pkg/train.py": "import toy", "toy.py": "import elastic"}, False),
        ({"pkg/train.py": "import pkg.toy", "pkg/toy.py": "import elastic"}, False),
        ({"pkg/train.py": "", "pkg/__init__.py": "import elastic"}, False),
        ({"pkg/train.py": "from ....... import elastic"}, True),
        ({"pkg/train.py": "this is no Python"}, False),
    ],
)
def test_package_imports_are_examined(here: Path, files: dict[str, str], classic: bool) -> None:
    write(here, files)
    assert is_classic("pkg.train", Launch.AUTO, module=True) is classic


def test_a_relative_import_from_a_parent_package_is_followed(here: Path) -> None:
    write(here, {"pkg/deep/train.py": "from ..toy import Toy", "pkg/toy.py": "import elastic"})
    assert not is_classic("pkg.deep.train", Launch.AUTO, module=True)


def test_imports_outside_an_installed_modules_package_are_not_examined(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all of torch would be examined for an installed module that imports it."""
    write(here, {"lib/pkg/train.py": "import other", "lib/other.py": "import elastic"})
    monkeypatch.syspath_prepend(here / "lib")
    assert is_classic("pkg.train", Launch.AUTO, module=True)


def test_imports_of_a_packages_main_decide_unless_launch_says_otherwise(here: Path) -> None:
    write(here, {"pkg/__main__.py": "from .toy import x", "pkg/toy.py": "import elastic"})
    assert not is_classic("pkg", Launch.AUTO, module=True)
    assert is_classic("pkg", Launch.TORCHRUN, module=True)
