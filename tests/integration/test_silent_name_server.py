"""Names in /etc/hosts serve also where no name server answers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.hosts.ability import require_hosts
from tests.job_process import DIE_WITH_PARENT

NAME = "etcd.cut-off"
SILENT = "127.77.53.53"
WITHIN_S = 5.0


def test_a_name_in_etc_hosts_is_found_at_once(tmp_path: Path) -> None:
    """gRPC's own resolver asks the name server for the address of the other family all the same."""
    require_hosts()  # the files are put in place in a mount namespace
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n127.0.0.1 {NAME}\n")
    (tmp_path / "resolv.conf").write_text(f"nameserver {SILENT}\n")
    put = "".join(f"mount --bind {path} /etc/{path.name} && " for path in tmp_path.iterdir())
    inside = ["unshare", "--mount", "sh", "-c", f'{put}exec "$0" "$@"']
    environment = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as name_server,
        socket.create_server(("127.0.0.1", 0)) as etcd,
    ):
        name_server.bind((SILENT, 53))
        endpoint = f"http://{NAME}:{etcd.getsockname()[1]}"
        jobs = [sys.executable, "-m", "elastic.cli", "jobs", "--etcd", endpoint, "--insecure"]
        command = [*DIE_WITH_PARENT, *inside, *jobs]
        asks = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            etcd.settimeout(WITHIN_S)
            etcd.accept()[0].close()
        finally:
            asks.kill()
            asks.wait()
