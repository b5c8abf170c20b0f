"""The commands of docs/SECURITY.md make certificates that are accepted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
    elastic = f'elastic() {{ "{sys.executable}" -m elastic.cli "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-e", "-c", elastic + commands],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(DOCUMENT.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    made = tmp_path / "authority"
    files = TlsFiles(ca=made / "ca.pem", certificate=made / "digits.pem", key=made / "digits.key")
    for role in Role:
        assert load_certificate(files, "digits", role).dns_names == ("digits.job.elastic",)
        assert verification_problem(files, role) == ""
    assert not readable_by_others(made / "digits.key")
    assert not readable_by_others(made / "ca.key")
