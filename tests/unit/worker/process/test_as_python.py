"""Scripts and modules find in a worker what they find under plain Python."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.worker.process import as_python

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("safe_path", "path"), [(False, ["/scripts", "/first", "/last"]), (True, ["/first", "/last"])]
)
def test_the_scripts_directory_comes_first_in_the_path_unless_safe_path_is_set(
    safe_path: bool, path: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ["/first", "/last"]
    flags = SimpleNamespace(safe_path=safe_path)
    monkeypatch.setattr(as_python, "sys", SimpleNamespace(path=found, flags=flags))
    as_python.add_script_dir_to_path("/scripts/train.py")
    assert found == path


# ---- scripts

TELLS_OF_A_SCRIPT = """\
import inspect, json, os, pickle, sys
def own(): pass
class Own: pass
os.chdir("/")  # as Hydra does
main = sys.modules["__main__"]
try:
    source = inspect.getsource(own)
except OSError as error:
    source = repr(error)
print(json.dumps({
    "name": __name__, "file": __file__, "package": __package__, "cached": __cached__,
    "doc": __doc__, "builtins": type(__builtins__).__name__,
    "loader": [type(__loader__).__name__, getattr(__loader__, "path", None)],
    "spec": __spec__ and [__spec__.name, __spec__.origin, __spec__.parent, __spec__.cached],
    "beside": os.path.dirname(os.path.abspath(__file__)), "argv": sys.argv,
    "path": sys.path[0], "code": own.__code__.co_filename, "source": source,
    "is_main": main.__dict__ is globals(),
    "pickled": type(pickle.loads(pickle.dumps(Own()))).__name__,
}))
"""
RUNS_A_SCRIPT = """\
import sys
from elastic.worker.process.as_python import run_program
sys.path.remove('')
run_program(sys.argv[1:], module=False)
"""


SCRIPTS = ["train.py", "./train.py", "sub/../train.py", "{}/train.py", "train", "train.pyc"]


@pytest.mark.parametrize("script", [*SCRIPTS, "folder", "./train.zip"])
def test_a_script_finds_what_it_finds_under_plain_python(tmp_path: Path, script: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "folder").mkdir()
    for name in ("train.py", "train", "folder/__main__.py"):
        (tmp_path / name).write_text(TELLS_OF_A_SCRIPT)
    py_compile.compile(str(tmp_path / "train.py"), str(tmp_path / "train.pyc"))
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        archive.write(tmp_path / "train", "__main__.py")
    script = script.format(tmp_path)
    plain = told(script, "a", "--b", cwd=tmp_path)
    ours = told("-c", RUNS_A_SCRIPT, script, "a", "--b", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert (ours.returncode, ours.stderr) == (0, "")
    found = json.loads(ours.stdout)
    assert found == json.loads(plain.stdout)
    assert found["argv"] == [script, "a", "--b"]
    assert Path(found["file"]).is_absolute()


def test_a_traceback_is_that_of_plain_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def f():\n    raise ValueError('no')\nf()\n")
    plain = told("train.py", cwd=tmp_path)
    ours = told("-c", RUNS_A_SCRIPT, "train.py", cwd=tmp_path)
    assert "line 2, in f" in plain.stderr
    assert ours.stderr.endswith(plain.stderr.partition("\n")[2])


def test_a_script_runs_where_the_working_directory_was_removed(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "train.py").write_text("print(__file__)")
    removes = RUNS_A_SCRIPT.replace(
        "run_program(", "import os\nos.rmdir(os.getcwd())\nrun_program("
    )
    ours = told("-c", removes, str(tmp_path / "train.py"), cwd=tmp_path / "here")
    assert ours.stdout == f"{tmp_path / 'train.py'}\n", ours.stderr


# ---- modules, as under `python -m`

TELLS = """\
import json, os, pickle, sys, warnings
from .beside import BESIDE
class Own: pass
main = sys.modules["__main__"]
spec = main.__spec__
print(json.dumps({
    "name": __name__, "file": __file__, "package": __package__, "cached": __cached__,
    "doc": __doc__, "loader": type(__loader__).__name__,
    "builtins": type(__builtins__).__name__,
    "spec": [spec.name, spec.origin, spec.parent, spec.cached], "argv": sys.argv,
    "path": sys.path[0], "beside": BESIDE, "is_main": main.__dict__ is globals(),
    "pickled": type(pickle.loads(pickle.dumps(Own()))).__name__,
}))
"""
BESIDE = "import sys\nBESIDE = [__name__, list(sys.argv)]\n"
AS_WORKERS_DO = """\
import sys
from elastic.worker.process.as_python import run_program
sys.path.remove('')
run_program(sys.argv[1:], module=True)
"""
PACKAGES = {
    "pkg.train": ["pkg/__init__.py", "pkg/train.py", "pkg/beside.py"],
    "pkg.deep": ["pkg/__init__.py", "pkg/deep/__init__.py", "pkg/deep/__main__.py"],
    "spaces.train": ["spaces/train.py"],
    "again.train": ["again/__init__.py", "again/train.py"],
    "missing.train": [],
}


def told(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_a_module_prints_and_exits_as_under_plain_python(tmp_path: Path, name: str) -> None:
    for file in PACKAGES[name]:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TELLS if path.name in ("train.py", "__main__.py") else "")
        (path.parent / "beside.py").write_text(BESIDE)
    if name == "again.train":
        (tmp_path / "again/__init__.py").write_text("from . import train")
        (tmp_path / "again/train.py").write_text("import json\nprint(json.dumps(__name__))")
    plain = told("-m", name, "a", "--b", cwd=tmp_path)
    ours = told("-c", AS_WORKERS_DO, name, "a", "--b", cwd=tmp_path)
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode
    assert ("RuntimeWarning" in ours.stderr) == ("RuntimeWarning" in plain.stderr)
    if name.startswith("missing"):
        assert "No module named 'missing'" in ours.stderr
    elif name != "again.train":
        found = json.loads(ours.stdout.splitlines()[-1])
        assert found["name"] == "__main__"
        assert found["argv"][0] == found["file"]
        assert Path(found["file"]).is_absolute()


def test_a_module_is_not_taken_for_one_that_the_zygote_has_imported(tmp_path: Path) -> None:
    """Plain Python has imported less when it looks for the module."""
    (tmp_path / "trace.py").write_text("print('this one')")
    imports = AS_WORKERS_DO.replace("run_program(", "import trace\nrun_program(")
    ours = told("-c", imports, "trace", cwd=tmp_path)
    assert ours.stdout == "this one\n"


@pytest.mark.parametrize(
    ("file", "name"), [("pkg/train.py", "pkg.train"), ("pkg/__main__.py", "pkg")]
)
def test_programs_are_named_by_module_or_path(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / "pkg").mkdir()
    says = "from elastic.worker.process.as_python import name_of_program as n\nprint(n())"
    (tmp_path / file).write_text(says)
    assert told("-c", AS_WORKERS_DO, name, cwd=tmp_path).stdout == f"{name}\n"
    path = str(tmp_path / file)
    assert told(path, cwd=tmp_path).stdout == f"{path}\n"


def test_spawned_processes_find_the_functions_of_the_module(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/twice.py").write_text("def twice(n): return 2 * n")
    (tmp_path / "pkg/train.py").write_text(
        "import multiprocessing\n"
        "from .twice import twice\n"
        "def work(n): return twice(n)\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [1, 2]))\n"
    )
    ran = told("-c", AS_WORKERS_DO, "pkg.train", cwd=tmp_path)
    assert ran.stdout == "[2, 4]\n", ran.stderr


@pytest.mark.parametrize(
    "code", ["0", "256", "-1", "2**40 + 7", "2**64", "-(2**80)", "None", "'no'"]
)
def test_an_exit_code_is_that_of_plain_python(code: str) -> None:
    plain = subprocess.run([sys.executable, "-c", f"import sys; sys.exit({code})"], check=False)
    assert as_python.code_of(SystemExit(eval(code))) == plain.returncode
