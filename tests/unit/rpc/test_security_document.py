"""The commands of docs/SECURITY.md make certificates that are accepted."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from elastic.rpc.certificates import (
    Role,
    load_certificate,
    readable_by_others,
    verification_problem,
)
from elastic.settings.tls_files import TlsFiles

DOCUMENT = Path(__file__).parents[3] / "docs" / "SECURITY.md"


def test_the_commands_make_certificates_of_the_job(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    done = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    files = TlsFiles(
        ca=tmp_path / "ca.pem", certificate=tmp_path / "digits.pem", key=tmp_path / "digits.key"
    )
    for role in Role:
        assert load_certificate(files, "digits", role).dns_names == ("digits.job.elastic",)
        assert verification_problem(files, role) == ""
    assert not readable_by_others(tmp_path / "digits.key")
    assert not readable_by_others(tmp_path / "ca.key")
