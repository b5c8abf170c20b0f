"""What a machine answers on which elastic cannot run, or is installed beside another project's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.version import other_package, unfit_system

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system_is_told_what_elastic_needs(platform: str) -> None:
    program = f"import sys; sys.platform = {platform!r}; import elastic\n"
    command = program + "from elastic.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == f"error: {unfit_system(platform)}\n"
    script = program + "elastic.init()"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.endswith(f"ImportError: {unfit_system(platform)}\n")


def test_python_m_elastic_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elastic", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith("0.1.0")


def test_the_package_of_another_project_beside_it_is_refused(tmp_path: Path) -> None:
    for name in ("__init__.py", "version.py"):
        (tmp_path / "elastic").mkdir(exist_ok=True)
        shutil.copy(ROOT / "elastic" / name, tmp_path / "elastic" / name)
    (tmp_path / "elastic_ddp-0.1.0.dist-info").mkdir()
    subprocess.run([sys.executable, "-c", "import elastic"], cwd=tmp_path, check=True)
    (tmp_path / "elastic-2.4.1.dist-info").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "import elastic"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.endswith(f"ImportError: {other_package(tmp_path)}\n")
