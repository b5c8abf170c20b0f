"""The systemd units match the code: exit codes, times, files. No running systemd is needed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from elastic.cli.agent import STOP_MARGIN_S
from elastic.cli.coordinator import STOP_TIMEOUT_S
from elastic.errors import ExitCode
from elastic.runtime.leave_signals import LEAVE_SIGNALS, RESTART_SIGNAL
from elastic.settings.commands import every_option
from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.doctor import DoctorSettings, FailOn
from elastic.settings.fields import options_of
from elastic.settings.node import NodeSettings
from elastic.settings.operator import OperatorSettings
from elastic.settings.sources import DeviceCounts, load_settings

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
AGENT, COORDINATOR = "elastic-agent@.service", "elastic-coordinator@.service"
BOTH = pytest.mark.parametrize("name", [AGENT, COORDINATOR])
EXPOSURE = 3.5
PAUSED = {ExitCode.INTERRUPTED, ExitCode.TERMINATED}
"""All nodes have left after signals; the run continues when they come back."""


def unit(name: str) -> dict[str, list[str]]:
    """Return the values of each key, by "Section.Key"."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in (UNITS / name).read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            continue
        key, equals, value = line.partition("=")
        assert section, line
        assert equals, line
        found.setdefault(f"{section}.{key}", []).append(value)
    return found


def one(name: str, key: str) -> str:
    (value,) = unit(name)[f"Service.{key}"]
    return value


def codes(name: str, key: str) -> set[int]:
    return set(map(int, one(name, key).split()))


@BOTH
def test_only_exit_codes_that_a_restart_can_help_cause_a_restart(name: str) -> None:
    assert one(name, "Restart") == "on-failure"
    stays = codes(name, "RestartPreventExitStatus")
    expected = set(ExitCode) - {ExitCode.OK, ExitCode.TEMPORARY}
    if name == COORDINATOR:
        expected -= {ExitCode.DRAINED, ExitCode.QUARANTINED}  # only agents exit with these
        expected -= PAUSED
    assert stays == expected


def test_only_the_coordinator_restarts_when_all_nodes_have_left_after_signals() -> None:
    assert codes(COORDINATOR, "RestartForceExitStatus") == PAUSED
    assert "Service.RestartForceExitStatus" not in unit(AGENT)


@BOTH
def test_exit_codes_that_an_operator_caused_count_as_success(name: str) -> None:
    wanted = {ExitCode.STOPPED, *PAUSED}
    wanted |= {ExitCode.DRAINED} if name == AGENT else set()
    assert codes(name, "SuccessExitStatus") == wanted


def test_the_documented_table_of_exit_codes_is_complete() -> None:
    table = (ROOT / "docs" / "EVENTS.md").read_text().partition("# Exit codes")[2]
    rows = [re.findall(r"\d+", row) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M)]
    assert {int(code) for row in rows for code in row} == set(ExitCode)


def test_an_agent_has_time_to_leave_and_its_successor_has_time_to_adopt_the_workers() -> None:
    default = {option.name: option.default for option in options_of(NodeSettings)}
    needed_s = default["drain_timeout_s"] + STOP_MARGIN_S
    assert int(one(AGENT, "TimeoutStopSec")) >= needed_s
    assert int(one(COORDINATOR, "TimeoutStopSec")) >= STOP_TIMEOUT_S
    assert int(one(AGENT, "RestartSec")) < default["grace_s"] / 4
    assert one(AGENT, "KillMode") == "process"
    assert one(AGENT, "RestartKillSignal") == LEAVE_SIGNALS[RESTART_SIGNAL][1]
    assert one(AGENT, "RuntimeDirectoryPreserve") == "yes"
    assert "Service.PrivateTmp" not in unit(AGENT)


@BOTH
def test_systemd_accepts_notifications_from_the_main_process_only(name: str) -> None:
    assert one(name, "Type") == "notify"
    assert one(name, "NotifyAccess") == "main"
    assert int(one(name, "WatchdogSec")) >= 10


@BOTH
def test_the_unit_runs_the_right_command_with_known_variables(name: str) -> None:
    command = shlex.split(one(name, "ExecStart"))
    given = unit(name)["Service.Environment"]
    variables = {pair.partition("=")[0] for line in given for pair in line.split()}
    known = {option.variable for option in every_option().values()} | {"PYTHONFAULTHANDLER"}
    assert variables <= known
    assert command[1] in name
    assert command[2:6] == ["--config", "/etc/elastic/%i.toml", "--job", "%i"]


def test_the_agents_directories_are_those_that_systemd_makes() -> None:
    environment = " ".join(unit(AGENT)["Service.Environment"])
    assert f"ELASTIC_STATE_DIR=/run/{one(AGENT, 'RuntimeDirectory')} " in environment
    assert f"ELASTIC_LOG_DIR=/var/log/{one(AGENT, 'LogsDirectory')}" in environment


@pytest.mark.parametrize("settings", [NodeSettings, CoordinatorSettings, OperatorSettings])
def test_the_settings_file_in_the_bare_metal_docs_is_valid(settings: type, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "BARE_METAL.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "gpt.toml"
    file.write_text(example)
    loaded = load_settings(settings, {}, {}, file, lambda: DeviceCounts(8, 64))
    assert len(loaded.store.etcd) == 3
    if settings is NodeSettings:
        assert Path(loaded.preemption_command[0]).name == "elastic-preemption-watch"


def test_the_doctor_drop_in_uses_the_settings_file_of_the_agent(tmp_path: Path) -> None:
    (line,) = unit("doctor.conf")["Service.ExecStartPre"]
    command = shlex.split(line)
    assert command[:2] == ["/opt/elastic/bin/elastic", "doctor"]
    assert command[0] == shlex.split(one(AGENT, "ExecStart"))[0]
    (example,) = re.findall(
        r"```toml\n(.*?)```", (ROOT / "docs" / "BARE_METAL.md").read_text(), re.DOTALL
    )
    file = tmp_path / "gpt.toml"
    file.write_text(example)
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert options.pop("--config") == "/etc/elastic/%i.toml"
    given = {flag.removeprefix("--").replace("-", "_"): text for flag, text in options.items()}
    given["job"] = given["job"].replace("%i", "gpt")
    loaded = load_settings(DoctorSettings, given, {}, file, lambda: DeviceCounts(8, 64))
    assert (loaded.job, loaded.fail_on, loaded.nproc_per_node) == ("gpt", FailOn.ERROR, 8)
    assert loaded.checkpoint_dir == "/shared/gpt"


def test_files_that_the_bare_metal_docs_name_exist() -> None:
    text = (ROOT / "docs" / "BARE_METAL.md").read_text()
    for path in re.findall(r"deploy/systemd/[-\w.@]+\w", text):
        assert (ROOT / path).exists(), path
    assert (UNITS / "elastic-preemption-watch").stat().st_mode & 0o111


@BOTH
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_analyze_finds_no_error_and_little_exposure(name: str, tmp_path: Path) -> None:
    copy = tmp_path / name
    text = (UNITS / name).read_text()
    copy.write_text(text.replace("/opt/elastic/bin/elastic", "/bin/true"))  # the program must exist
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, timeout=60
    )
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE * 10:.0f}"]
    looked = subprocess.run([*command, copy], capture_output=True, text=True, timeout=60)
    assert looked.returncode == 0, looked.stdout
