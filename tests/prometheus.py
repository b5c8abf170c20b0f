"""Runs a real Prometheus and promtool: Debian's, installed or unpacked by `make prometheus`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.etcd_cluster import free_ports
from tests.hosts import Host
from tests.job_process import DIE_WITH_PARENT
from tests.waiting import eventually

DEADLINE_S = 30.0
_UNPACKED = Path(sys.prefix) / "prometheus" / "usr" / "bin"

Series = dict[str, Any]
"""One series of an answer: `metric`, its labels, and `value`, a time and the text of a number."""


class NoExpression(Exception):
    """Prometheus refuses an expression; the text has its reason."""


def require_program(name: str) -> str:
    """The path of `prometheus` or `promtool`. Skips the test without it; with CI=true fails it."""
    found = shutil.which(name) or shutil.which(name, path=str(_UNPACKED))
    if found is not None:
        return found
    message = f"needs {name} (make prometheus, or Debian's package prometheus)"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def promtool(*arguments: str | Path, given: str = "") -> tuple[int, str]:
    """Run promtool; returns its exit code and all of its output."""
    done = subprocess.run(
        [require_program("promtool"), *map(str, arguments)],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


class Prometheus:
    """A running Prometheus. address: where it answers. host: where it runs; None: this machine."""

    def __init__(self, address: str, host: Host | None = None) -> None:
        self.address = address
        self._host = host

    def get(self, path: str, **parameters: str | Sequence[str]) -> Any:
        """The data of its HTTP API at the path. Raises NoExpression if it refuses the query."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            return json.loads(self._read(f"api/v1/{path}?{query}"))["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise NoExpression(f"{parameters}: {error.read().decode()}") from error

    def ask(self, expression: str) -> list[Series]:
        """The present series of an expression; a scalar is one without labels."""
        answer = self.get("query", query=expression)
        found = answer["result"]
        if answer["resultType"] == "scalar":
            return [{"metric": {}, "value": found}]
        return list(found)

    def wait(
        self, condition: Callable[[], bool], what: Callable[[], str], deadline_s: float = DEADLINE_S
    ) -> None:
        """Wait until the condition holds; fails with the text of `what`."""
        eventually(condition, what, deadline_s, every_s=0.1)

    def answers(self) -> bool:
        try:
            self._read("-/ready")
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _read(self, path: str) -> bytes:
        def read() -> bytes:
            with urllib.request.urlopen(f"{self.address}/{path}", timeout=10) as answer:
                return bytes(answer.read())

        return read() if self._host is None else self._host.namespace.inside(read)


@contextlib.contextmanager
def prometheus(
    directory: Path,
    *,
    targets: Sequence[str],
    rules: Sequence[Path] = (),
    every: str = "500ms",
    host: Host | None = None,
) -> Iterator[Prometheus]:
    """A ready Prometheus that scrapes the targets and evaluates the rules at intervals of `every`.

    directory: a new one, for its configuration and data. host: where it runs; None: this machine.
    """
    program = require_program("prometheus")
    directory.mkdir()
    (port,) = free_ports(1)
    configuration: Mapping[str, Any] = {
        "global": {
            "scrape_interval": every,
            "scrape_timeout": every,
            "evaluation_interval": every,
        },
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {
                "job_name": "elastic",
                "honor_labels": True,
                "static_configs": [{"targets": list(targets)}],
            }
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    options = {
        "config.file": directory / "prometheus.yml",
        "storage.tsdb.path": directory / "data",
        "web.listen-address": f"127.0.0.1:{port}",
        "log.level": "warn",
    }
    log = (directory / "log").open("wb")
    arguments = [program, *(f"--{name}={value}" for name, value in options.items())]
    with (
        log,
        subprocess.Popen(
            host.command(*arguments) if host is not None else [*DIE_WITH_PARENT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "GOMAXPROCS": "1"},
        ) as process,
    ):
        try:
            found = Prometheus(f"http://127.0.0.1:{port}", host)
            found.wait(found.answers, (directory / "log").read_text)
            yield found
        finally:
            process.kill()
