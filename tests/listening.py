"""Finds out at which addresses a process listens."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def listens(pid: int) -> dict[str, str]:
    """Return the HOST:PORT of each socket at which a process accepts connections from the network,
    with the process's name; empty if it has ended."""
    found: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        sockets = _listening(pid)
        name = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if (where := sockets.get(os.readlink(descriptor))) is not None:
                    found[where] = name
    return found


def _listening(pid: int) -> dict[str, str]:
    """The addresses of the listening sockets in the process's network, by the sockets' links."""
    found = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A":
                host, _, port = local.partition(":")
                words = bytes.fromhex(host)
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                address = socket.inet_ntop(family, packed).removeprefix("::ffff:")  # IPv4 in IPv6
                found[f"socket:[{inode}]"] = f"{address}:{int(port, 16)}"
    return found
