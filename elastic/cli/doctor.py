"""`elastic doctor`: examines this node, prints the findings, and says if a job can begin."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic.cli.etcd import host_name, options_of_store
from elastic.cli.formats import print_json, print_table, require_format, say
from elastic.cli.launch import log_root
from elastic.doctor.checks import Result, Verdict, worst
from elastic.doctor.examination import Subject, examine
from elastic.errors import ExitCode
from elastic.rpc.security import choose_security
from elastic.settings.doctor import DoctorSettings, FailOn, MachineSettings
from elastic.version import __version__

_REMOTE = "://"


def doctor(settings: MachineSettings, *, output: str) -> int:
    """Examine this node, print the findings, and return the exit code.

    Raises ConfigurationError.
    """
    as_json = require_format(output)
    node = settings.node_name or host_name()
    began = time.monotonic()
    subject = Subject(
        settings=settings,
        node=node,
        etcd=(
            options_of_store(settings.store, settings.security)
            if isinstance(settings, DoctorSettings)
            else None
        ),
        security=choose_security(settings.job, settings.security),
        directories=_directories(settings),
    )
    verdicts = asyncio.run(examine(subject))
    took_s = time.monotonic() - began
    code = exit_code(verdicts, settings.fail_on)
    if as_json:
        print_json(document(verdicts, node=node, took_s=took_s, code=code))
    else:
        _print(verdicts, node=node, took_s=took_s)
    return code


def exit_code(verdicts: Sequence[Verdict], fail_on: FailOn) -> int:
    """0; 78 if something must be fixed; 75 if everything that counts may pass by itself."""
    counts = {
        FailOn.NEVER: (),
        FailOn.ERROR: (Result.ERROR,),
        FailOn.WARNING: (Result.ERROR, Result.WARNING),
    }[fail_on]
    failing = [verdict for verdict in verdicts if verdict.result in counts]
    if not failing:
        return int(ExitCode.OK)
    passes = all(verdict.may_pass for verdict in failing)
    return int(ExitCode.TEMPORARY if passes else ExitCode.CONFIGURATION)


def document(verdicts: Sequence[Verdict], *, node: str, took_s: float, code: int) -> dict[str, Any]:
    """The findings as JSON values."""
    return {
        "node": node,
        "elastic": __version__,
        "result": worst(verdicts).value,
        "exit_code": code,
        "took_s": round(took_s, 2),
        "checks": [
            {
                "check": verdict.check,
                "subject": verdict.subject,
                "result": verdict.result.value,
                "fault": verdict.fault.value if verdict.fault else None,
                "found": verdict.found,
                "remedy": verdict.remedy or None,
            }
            for verdict in verdicts
        ],
    }


def _print(verdicts: Sequence[Verdict], *, node: str, took_s: float) -> None:
    columns = ("check", "subject", "result", "found")
    rows = [(v.check, v.subject, v.result.value, v.found) for v in verdicts]
    print_table(columns, rows)
    faulty = [verdict for verdict in verdicts if verdict.fault is not None]
    for verdict in sorted(faulty, key=lambda v: v.result is not Result.ERROR):
        assert verdict.fault is not None
        say()
        say(f"{verdict.result.value}: {verdict.fault.value}: {verdict.check}, {verdict.subject}")
        say(f"  found: {verdict.found}")
        say(f"  to do: {verdict.remedy}")
    errors = sum(verdict.result is Result.ERROR for verdict in verdicts)
    warnings = len(faulty) - errors
    say()
    say(f"{node}: {len(verdicts)} checks in {took_s:.1f} s, {errors} errors, {warnings} warnings")


def _directories(settings: MachineSettings) -> list[tuple[Path, str]]:
    """The local directories to check, and what each is for. The free space of a URL is unknown."""
    state = settings.state_dir or Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    found = [
        (settings.log_dir or log_root(), "logs"),
        (state, "state"),
        (Path(tempfile.gettempdir()), "temporary files"),
    ]
    url = settings.checkpoint_dir
    if url is not None and _REMOTE not in url:
        found.append((Path(url).expanduser(), "checkpoints"))
    return found
