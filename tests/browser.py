"""Drives a real Chromium without a window through its debugging pipe.

It needs only the standard library and Debian's chromium-headless-shell.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.job_process import DIE_WITH_PARENT
from tests.waiting import eventually

COMMANDS = ("chromium-headless-shell", "chromium")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--disable-background-networking", "--disable-sync"),
    *("--no-first-run", "--no-default-browser-check", "--remote-debugging-pipe"),
)
_POLL_S = 0.02
DEADLINE_S = 30.0


def require_browser() -> str:
    """The path of a browser. Skips the test if there is none; with CI=true fails it."""
    for command in COMMANDS:
        if (found := shutil.which(command)) is not None:
            return found
    message = f"needs one of {', '.join(COMMANDS)} (make install)"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


class Tab:
    """One page in a browser."""

    def __init__(
        self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int
    ) -> None:
        self._process, self._to, self._from = process, to_browser, from_browser
        self._numbers = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._rest = b""
        self.errors: list[str] = []
        """Errors of scripts, console, network and Content-Security-Policy, as they come."""
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol; returns its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        ends_at = time.monotonic() + DEADLINE_S
        while number not in self._answers:
            self._read(ends_at - time.monotonic())
            assert time.monotonic() < ends_at, f"the browser does not answer {method}"
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression: str, deadline_s: float = DEADLINE_S) -> Any:

        def shown() -> str:
            return f"{expression}\n{self.evaluate('document.body?.innerText')}"

        return eventually(lambda: self.evaluate(expression), shown, deadline_s, every_s=_POLL_S)

    def press(self, key: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, "")
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37}
        common = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Set the screen's size in pixels and its theme. Below a width of 600 it is a phone."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save the page, or only its visible part, as PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def first_paint_ms(self) -> float:
        """The time from the start of the navigation to the first visible content."""
        entries = "performance.getEntriesByName('first-contentful-paint')"
        self.wait_for(f"{entries}.length")
        return float(self.evaluate(f"{entries}[0].startTime"))

    def _read(self, within_s: float) -> None:
        ready, _, _ = select.select([self._from], [], [], max(0.0, within_s))
        if not ready:
            return
        data = os.read(self._from, 1 << 20)
        assert data, f"the browser has ended ({self._process.poll()})"
        *messages, self._rest = (self._rest + data).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._told(message["method"], message["params"])

    def _told(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str([a.get("value") for a in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """A browser with an empty profile, which ends with the test."""
    command = require_browser()
    with contextlib.ExitStack() as ends:
        profile = ends.enter_context(tempfile.TemporaryDirectory(prefix="el-browser-"))
        their_input, ours = os.pipe()
        theirs, their_output = os.pipe()
        for descriptor in (ours, theirs):
            ends.callback(os.close, descriptor)
        shell = f'exec "$0" "$@" 3<&{their_input} 4>&{their_output}'
        process = subprocess.Popen(
            [
                *DIE_WITH_PARENT,
                "bash",
                "-c",
                shell,
                command,
                *_OPTIONS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(their_input, their_output),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for descriptor in (their_input, their_output):
            os.close(descriptor)
        try:
            yield Tab(process, ours, theirs)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
