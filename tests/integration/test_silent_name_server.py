"""Commands and workers do not depend on a name server that does not answer."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.ability import require_hosts
from tests.job_process import DIE_WITH_PARENT

SCRIPTS = Path(__file__).parent / "scripts"
NAME = "etcd.cut-off"
SILENT = "127.77.53.53"
WITHIN_S = 5.0


LOOKS_UP = """
import sys
from torch.distributed import TCPStore
from elastic.worker.group.peer_names import never_look_up_peers
if "never" in sys.argv:
    never_look_up_peers()
server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
for _ in range(3):
    TCPStore("127.0.0.1", server.port, is_master=False).set("a", "b")
"""


@contextlib.contextmanager
def silent_name_server(files: Path, hosts: str) -> Iterator[tuple[list[str], socket.socket]]:
    """Yield a command whose arguments run with this name server, and the server's socket."""
    require_hosts()  # the files are put in place in a mount namespace
    (files / "hosts").write_text(hosts)
    (files / "resolv.conf").write_text(f"nameserver {SILENT}\n")
    put = "".join(f"mount --bind {path} /etc/{path.name} && " for path in files.iterdir())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as name_server:
        name_server.bind((SILENT, 53))
        name_server.setblocking(False)
        yield (
            [*DIE_WITH_PARENT, "unshare", "--mount", "sh", "-c", f'{put}exec "$0" "$@"'],
            name_server,
        )


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}


def ran(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Its resolver waits one second for an answer."""
    patience = {**environment(), "RES_OPTIONS": "timeout:1 attempts:1"}
    return subprocess.run(command, env=patience, capture_output=True, text=True, check=True)


def test_a_name_in_etc_hosts_is_found_at_once(tmp_path: Path) -> None:
    """gRPC's own resolver would still ask the name server for the other address family."""
    with (
        silent_name_server(tmp_path, f"127.0.0.1 localhost\n127.0.0.1 {NAME}\n") as (inside, _),
        socket.create_server(("127.0.0.1", 0)) as etcd,
    ):
        endpoint = f"http://{NAME}:{etcd.getsockname()[1]}"
        jobs = [sys.executable, "-m", "elastic.cli", "jobs", "--etcd", endpoint, "--insecure"]
        asks = subprocess.Popen([*inside, *jobs], env=environment(), stderr=subprocess.DEVNULL)
        try:
            etcd.settimeout(WITHIN_S)
            etcd.accept()[0].close()
        finally:
            asks.kill()
            asks.wait()


@pytest.mark.long
def test_a_script_under_plain_python_looks_up_no_peer_names(tmp_path: Path) -> None:
    with silent_name_server(tmp_path, "127.0.0.1 localhost\n") as (inside, name_server):
        script = [sys.executable, str(SCRIPTS / "steady.py"), "--epochs", "1"]
        told = ran([*inside, *script])
        assert "step 12" in told.stdout
        asked = []
        with contextlib.suppress(BlockingIOError):
            while True:
                asked.append(name_server.recv(512))
        assert not [question for question in asked if b"in-addr" in question]


@pytest.mark.parametrize("asked", [True, False], ids=["torch alone", "in workers"])
def test_torch_looks_up_names_of_members_but_workers_do_not(tmp_path: Path, asked: bool) -> None:
    with silent_name_server(tmp_path, "127.0.0.1 localhost\n") as (inside, name_server):
        script = [sys.executable, "-c", LOOKS_UP, *([] if asked else ["never"])]
        told = ran([*inside, *script])
        if asked:
            assert b"in-addr" in name_server.recv(512), "torch has changed: this can go"
        else:
            assert told.stderr == ""
            with pytest.raises(BlockingIOError):
                name_server.recv(512)
