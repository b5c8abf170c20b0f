"""The example for --preemption-command, against a fake of each cloud's metadata service."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.registration import until_preempted

COMMAND = Path(__file__).parents[2] / "deploy" / "systemd" / "elastic-preemption-watch"
_AWS_ACTION = "/latest/meta-data/spot/instance-action"
_AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_GCE = "/computeMetadata/v1/instance"


class Metadata:
    """Serves documents by path, only for requests with the header that real services require."""

    def __init__(self) -> None:
        self.documents = {
            "/metadata/instance/compute/name?api-version=2021-02-01&format=text": "vm_1",
            _AZURE_EVENTS: _azure(),
            f"{_GCE}/preempted": "FALSE",
            f"{_GCE}/maintenance-event": "NONE",
        }
        documents = self.documents

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                authentic = (
                    self.headers["X-aws-ec2-metadata-token"] == "token"
                    if self.path.startswith("/latest")
                    else self.headers["Metadata-Flavor"] == "Google"
                    if self.path.startswith("/computeMetadata")
                    else self.headers["Metadata"] == "true"
                )
                self._answer(documents.get(self.path) if authentic else None)

            def do_PUT(self) -> None:
                ttl = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self._answer("token" if self.path == "/latest/api/token" and ttl else None)

            def _answer(self, document: str | None) -> None:
                self.send_response(200 if document is not None else 404)
                self.end_headers()
                self.wfile.write((document or "").encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    metadata = Metadata()
    yield metadata
    metadata.close()


def _azure(*events: dict[str, Any]) -> str:
    return json.dumps({"DocumentIncarnation": 1, "Events": events})


def _event(kind: str, *resources: str) -> dict[str, Any]:
    return {"EventId": "1", "EventType": kind, "Resources": resources, "EventStatus": "Scheduled"}


def _look(cloud: str, endpoint: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, COMMAND, cloud, "--endpoint", endpoint]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("cloud", ["aws", "azure", "gce"])
def test_the_watch_exits_with_1_when_there_is_no_notice(cloud: str, metadata: Metadata) -> None:
    seen = _look(cloud, metadata.endpoint)
    assert (seen.returncode, seen.stdout, seen.stderr) == (1, "", "")


@pytest.mark.parametrize(
    ("cloud", "path", "document"),
    [
        ("aws", _AWS_ACTION, '{"action": "terminate", "time": "2026-11-22T08:22:00Z"}'),
        ("azure", _AZURE_EVENTS, _azure(_event("Preempt", "vm_0", "vm_1"))),
        ("azure", _AZURE_EVENTS, _azure(_event("Terminate", "vm_1"))),
        ("gce", f"{_GCE}/preempted", "TRUE\n"),
        ("gce", f"{_GCE}/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
    ],
)
def test_the_watch_exits_with_0_and_a_reason_when_there_is_a_notice(
    cloud: str, path: str, document: str, metadata: Metadata
) -> None:
    metadata.documents[path] = document
    seen = _look(cloud, metadata.endpoint)
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout.strip()


@pytest.mark.parametrize(
    ("cloud", "path", "document"),
    [
        ("azure", _AZURE_EVENTS, _azure(_event("Preempt", "vm_2"), _event("Reboot", "vm_1"))),
        ("azure", _AZURE_EVENTS, "<html>"),
        ("azure", _AZURE_EVENTS, "[]"),
        ("gce", f"{_GCE}/maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE"),
    ],
)
def test_the_watch_exits_with_1_for_other_events_and_malformed_documents(
    cloud: str, path: str, document: str, metadata: Metadata
) -> None:
    metadata.documents[path] = document
    assert _look(cloud, metadata.endpoint).returncode == 1


@pytest.mark.parametrize("cloud", ["aws", "azure", "gce"])
def test_the_watch_exits_with_1_and_a_message_when_the_service_does_not_answer(cloud: str) -> None:
    seen = _look(cloud, "http://127.0.0.1:1")
    assert seen.returncode == 1
    assert f"the metadata service of {cloud} gave no valid answer" in seen.stderr


def test_an_agent_is_preempted_when_the_watch_sees_a_notice(metadata: Metadata) -> None:
    metadata.documents[_AWS_ACTION] = "{}"
    command = (sys.executable, str(COMMAND), "aws", "--endpoint", metadata.endpoint)
    noticed = until_preempted(file=None, command=command, interval_s=0.05, on_problem=pytest.fail)
    reason = asyncio.run(asyncio.wait_for(noticed, 60.0))
    assert reason.endswith(" exited with 0")
