"""Skips or fails tests on a machine that cannot have hosts in miniature."""

from __future__ import annotations

import functools
import os
import shutil

import pytest

from tests.hosts.namespaces import Unavailable
from tests.hosts.network import network

_TOOLS = {"ip": "iproute2", "setpriv": "util-linux", "unshare": "util-linux"}


def require_hosts() -> None:
    """Skip the test on a machine that lacks something; with CI=true fail it."""
    lacking = missing_requirement()
    if not lacking:
        return
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"CI must be able to run this: {lacking}", pytrace=False)
    pytest.skip(lacking)


@functools.cache
def missing_requirement() -> str:
    """What the machine lacks, in words; empty if it lacks nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root, and this is not root: run the tests as root"
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"no `{tool}` in PATH: install {package}"
    try:
        with network("a", "b") as net:
            net.cut(net.host("a"))
            net.host("a").run("true").check_returncode()
    except Unavailable as error:
        return str(error)
    return ""
