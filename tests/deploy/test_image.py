"""The image: its recipe, its contents, and that an unknown user can train with it."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fsspec.registry import known_implementations

from elastic.errors import ExitCode
from tests.deploy.image import CONTAINERFILE, ROOT, Builder, Container, Image, missing_requirement
from tests.deploy.image import builder as image_builder

SCRIPTS = ROOT / "tests" / "integration" / "scripts"
_DEADLINE_S = 120.0

builds = [
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement()),
]


def recipe() -> ModuleType:
    """Load deploy/image/requirements.py, which is in no package."""
    path = CONTAINERFILE.with_name("requirements.py")
    spec = importlib.util.spec_from_file_location("image_requirements", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hadolint_finds_no_fault_in_the_containerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, CONTAINERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("variant", "cuda", "words"),
    [
        ("cpu", None, ""),
        ("cuda", "12.9", ""),
        ("cpu", "12.9", "torch 2.13.0 came with CUDA 12.9: pass TORCH_INDEX_URL"),
        ("cuda", None, "torch 2.13.0 came without CUDA: pass TORCH_INDEX_URL"),
        ("gpu", "12.9", "VARIANT=gpu is neither cpu nor cuda"),
    ],
)
def test_a_torch_of_another_variant_is_refused(variant: str, cuda: str | None, words: str) -> None:
    wrong = recipe().what_is_wrong(variant, "2.13.0", cuda)
    assert words in wrong
    assert bool(wrong) == bool(words)


def test_dockerignore_lets_the_build_see_the_files_that_the_package_carries() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    (carried,) = re.findall(r"^CARRIED = (\(.*\))$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert set(ast.literal_eval(carried)) <= {line[1:] for line in lines if line.startswith("!")}


def test_requirements_are_those_of_the_package_and_unknown_extras_are_refused() -> None:
    command = [sys.executable, CONTAINERFILE.with_name("requirements.py"), ROOT / "pyproject.toml"]
    done = subprocess.run(
        [*command, "--extras", "tensorboard"], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert "torch>=2.6" in lines
    assert "tensorboardX>=2.6" in lines
    wrong = subprocess.run([*command, "--extras", "x"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    extras = "dev, examples, lightning, s3, tensorboard, transformers"
    assert f"EXTRAS has unknown names: x; use {extras}" in wrong.stderr


def test_the_image_can_open_the_checkpoint_urls_of_the_documents() -> None:
    texts = [ROOT / "docs" / "KUBERNETES.md", *sorted((ROOT / "helm" / "elastic").glob("*.*"))]
    schemes = {s for path in texts for s in re.findall(r"\b(\w+)://bucket", path.read_text())}
    assert schemes
    recipe_text = (ROOT / "deploy" / "image" / "Containerfile").read_text()
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", recipe_text, re.MULTILINE)
    command = [sys.executable, ROOT / "deploy/image/requirements.py", ROOT / "pyproject.toml"]
    listed = subprocess.run(
        [*command, "--extras", extras], capture_output=True, text=True, check=True
    ).stdout
    packages = set(re.findall(r"^[\w-]+", listed, re.MULTILINE))
    for scheme in schemes:
        module = known_implementations[scheme]["class"].partition(".")[0]
        assert module in packages, f"{scheme}:// needs {module}; add it to EXTRAS"


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    with image_builder() as one:
        yield one


@pytest.fixture(scope="module")
def image(builder: Builder) -> Image:
    done = builder.build("elastic", VARIANT="cpu", VERSION="0.1.0", REVISION="abc")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return builder.image("elastic")


class TestBuilt:
    pytestmark = builds

    def test_the_image_has_version_revision_entrypoint_and_user(self, image: Image) -> None:
        labels = image.config["Labels"]
        assert labels["org.opencontainers.image.version"] == "0.1.0"
        assert labels["org.opencontainers.image.revision"] == "abc"
        assert image.config["Entrypoint"] == ["elastic"]
        assert image.config["User"] == "10001:10001"

    def test_the_image_has_no_compiler_and_no_sources(self, image: Image) -> None:
        search = ":".join(str(image.root / p) for p in ("usr/bin", "usr/local/bin", "opt/elastic"))
        for tool in ("cc", "gcc", "c++", "clang", "make"):
            assert shutil.which(tool, path=search) is None
        assert not (image.root / "source").exists()
        assert list((image.root / "wheel").glob("*")) == []

    def test_an_unknown_user_can_train_on_a_read_only_root(
        self, image: Image, tmp_path: Path
    ) -> None:
        arguments = ("run", "--nproc-per-node", "2", "/in/steady.py", "--epochs", "2")
        with contextlib.closing(
            Container(image, tmp_path / "it", arguments, {"/in": SCRIPTS})
        ) as container:
            assert container.wait(_DEADLINE_S) == ExitCode.OK, container.output
        assert "job_finished" in container.output
        assert "weights" in container.output

    def test_sigterm_to_the_container_saves_a_checkpoint_and_exits_with_143(
        self, image: Image, tmp_path: Path
    ) -> None:
        arguments = ("run", "--checkpoint-dir", "/tmp/checkpoints", "/in/steady.py")
        paced = ("--epochs", "100000", "--pace-s", "0.05")
        with contextlib.closing(
            Container(image, tmp_path / "it", (*arguments, *paced), {"/in": SCRIPTS})
        ) as container:
            container.wait_for("step 5", _DEADLINE_S)
            container.signal(signal.SIGTERM)
            assert container.wait(_DEADLINE_S) == ExitCode.TERMINATED, container.output
        assert "checkpoint_committed" in container.output

    def test_the_cuda_variant_cannot_be_built_with_a_torch_without_cuda(
        self, builder: Builder, image: Image
    ) -> None:
        del image  # this build uses its layers again
        done = builder.build("wrong", VARIANT="cuda")
        assert done.returncode != 0
        assert "VARIANT=cuda, and torch" in done.stdout + done.stderr
