"""The units under a real, booted systemd: start, restart, kill, watchdog, stop, end, reboot."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from elastic.errors import ExitCode
from tests.deploy.booted import SOURCES, Machine, booted, missing_requirement

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement() or "-"),
]

AGENT, COORDINATOR = "elastic-agent@digits", "elastic-coordinator@digits"
_OUT = "/var/lib/elastic/out"
_SETTINGS = """
[job]
etcd = ["127.0.0.1:2379"]
checkpoint_dir = "/var/lib/elastic/checkpoints"

[coordinator]
listen = "127.0.0.1:29400"
gather_timeout_s = 1

[agent]
node_host = "127.0.0.1"
grace_s = 120  # this machine may be slow to start an agent again
spares = 0
"""
_SCRIPT = f"{SOURCES}/tests/chaos/scripts/float64_trainer.py {_OUT} --epochs 100000 --step-s 0.05"
_HASTY_START_S = 15
_TIMES = 20
_IMPATIENT = "[Service]\nWatchdogSec=10\n"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with booted(tmp_path_factory.mktemp("booted")) as machine:
        machine.run("systemd-sysusers")
        machine.run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/elastic.conf")
        machine.start_etcd()
        machine.write("/etc/elastic/digits.toml", _SETTINGS)
        machine.write("/etc/elastic/digits.env", f"SCRIPT={_SCRIPT}\n")
        machine.write(f"/etc/systemd/system/{AGENT}.service.d/watchdog.conf", _IMPATIENT)
        machine.run("sh", "-c", f"mkdir -p {_OUT}; chown -R elastic: /var/lib/elastic")
        machine.run("chmod", "-R", "a+rX", "/etc/elastic")
        machine.run("systemctl", "daemon-reload")
        yield machine


def test_workers_survive_restarts_a_kill_and_a_hang_of_their_agent(machine: Machine) -> None:
    machine.run("systemctl", "start", COORDINATOR, AGENT)
    assert _state(machine, AGENT) == _state(machine, COORDINATOR) == "active"
    _trains_on(machine)
    assert "leads, generation 1, 1 workers" in machine.property(COORDINATOR, "StatusText")
    workers = _workers(machine)
    assert workers

    for _ in range(_TIMES):
        agent = _main(machine)
        machine.run("systemctl", "restart", AGENT)
        assert _state(machine, AGENT) == "active"
        _trains_on(machine)
        assert _main(machine) != agent
        assert _workers(machine) == workers
    assert len(_tells(machine, AGENT, "handing_over")) == _TIMES
    assert _tells(machine, COORDINATOR, "generation_formed")[-1]["generation"] == 1

    _signal(machine, signal.SIGKILL)
    machine.wait(lambda: _restarts(machine) == 1 and _state(machine, AGENT) == "active", "restart")
    _trains_on(machine)
    assert _workers(machine) == workers

    _signal(machine, signal.SIGSTOP)  # the agent hangs
    machine.wait(lambda: "Watchdog timeout" in _journal(machine, AGENT), "bite of the watchdog")
    machine.wait(lambda: _restarts(machine) == 2 and _state(machine, AGENT) == "active", "restart")
    _trains_on(machine)
    assert _workers(machine) == workers
    assert "Fatal Python error: Aborted" in _journal(machine, AGENT)

    processes = _processes(machine, AGENT)
    machine.run("systemctl", "stop", AGENT)
    assert _state(machine, AGENT) == "inactive"  # not "failed", although it exits with 143
    left = machine.run("ps", "-o", "pid=,args=", "-p", ",".join(map(str, processes)), check=False)
    assert left == ""
    machine.wait(
        lambda: _restarts(machine, COORDINATOR) == 1 and _state(machine, COORDINATOR) == "active",
        "coordinator that waits for the nodes to come back",
    )
    machine.run("systemctl", "start", AGENT)
    _trains_on(machine)

    command = ("/opt/elastic/bin/elastic", "stop", "--job", "digits", "--etcd", "127.0.0.1:2379")
    machine.run(*command)
    for unit in (AGENT, COORDINATOR):
        machine.wait(lambda u=unit: _state(machine, u) == "inactive", f"end of {unit}")
    for unit in (AGENT, COORDINATOR):
        assert not _tells(machine, unit, "already_ended")
        machine.run("systemctl", "start", unit)  # as the next boot does
        machine.wait(lambda u=unit: _tells(machine, u, "already_ended"), f"{unit} that ends")
        machine.wait(lambda u=unit: _state(machine, u) == "inactive", f"end of {unit} again")
    assert _tells(machine, AGENT, "already_ended")[-1]["exit_code"] == ExitCode.STOPPED
    assert "elastic" not in machine.run("systemctl", "--failed", "--no-legend", check=False)


def test_a_reboot_resumes_a_running_job_but_not_one_that_has_ended(
    machine: Machine,
) -> None:
    agent, coordinator = "elastic-agent@again", "elastic-coordinator@again"
    machine.write("/etc/elastic/again.toml", _SETTINGS)
    machine.write("/etc/elastic/again.env", f"SCRIPT={_SCRIPT}\n")
    machine.run("chmod", "a+r", "/etc/elastic/again.toml")
    # Usually the coordinator runs elsewhere and outlives the agent.
    after = f"[Unit]\nAfter={coordinator}.service\n"
    machine.write(f"/etc/systemd/system/{agent}.service.d/order.conf", after)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "enable", "--now", coordinator, agent)
    _trains_on(machine, agent)
    workers = _tells(machine, agent, "worker_started")

    reached = _step(machine, agent)
    machine.reboot()
    _trains_on(machine, agent)
    (restored,) = _tells(machine, coordinator, "state_restored")
    assert restored["committed"] >= reached, "no step is lost that was committed before"
    assert len(_tells(machine, agent, "worker_started")) == len(workers)

    stop = ("/opt/elastic/bin/elastic", "stop", "--job", "again", "--etcd", "127.0.0.1:2379")
    machine.run(*stop)
    for unit in (agent, coordinator):
        machine.wait(lambda u=unit: _state(machine, u) == "inactive", f"end of {unit}")
    machine.reboot()
    for unit in (agent, coordinator):
        machine.wait(lambda u=unit: _tells(machine, u, "already_ended"), f"{unit} that ends")
        machine.wait(lambda u=unit: _state(machine, u) == "inactive", f"end of {unit} again")
    assert not _tells(machine, agent, "worker_started")
    machine.run("systemctl", "disable", agent, coordinator)


def test_an_agent_with_wrong_settings_says_so_and_is_not_restarted(machine: Machine) -> None:
    machine.write("/etc/elastic/wrong.toml", "[agent]\nspares = -1\n")
    machine.write("/etc/elastic/wrong.env", "SCRIPT=/nothing.py\n")
    machine.run("chmod", "a+r", "/etc/elastic/wrong.toml")
    unit = "elastic-agent@wrong"
    machine.run("systemctl", "start", unit, check=False)
    machine.wait(lambda: _state(machine, unit) == "failed", "failure")
    code = int(machine.property(unit, "ExecMainStatus"))
    assert code == ExitCode.CONFIGURATION
    assert "spares" in _journal(machine, unit)
    assert _restarts(machine, unit) == 0
    machine.run("systemctl", "reset-failed", unit)


def test_an_agent_waits_for_etcd_longer_than_the_start_timeout(machine: Machine) -> None:
    unit = "elastic-agent@waits"
    machine.write("/etc/elastic/waits.toml", '[job]\netcd = ["127.0.0.1:1"]\n')
    machine.write("/etc/elastic/waits.env", f"SCRIPT={_SCRIPT}\n")
    machine.run("chmod", "a+r", "/etc/elastic/waits.toml")
    hasty = f"[Service]\nTimeoutStartSec={_HASTY_START_S}\n"
    machine.write(f"/etc/systemd/system/{unit}.service.d/start.conf", hasty)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "--no-block", unit)
    began_at = time.monotonic()
    machine.wait(lambda: time.monotonic() > began_at + 2 * _HASTY_START_S, "the time")
    assert (_state(machine, unit), _restarts(machine, unit)) == ("activating", 0)
    assert machine.property(unit, "StatusText") == "registering in etcd"
    machine.run("systemctl", "stop", unit)
    assert _state(machine, unit) != "activating"
    machine.run("systemctl", "reset-failed", unit, check=False)


def _state(machine: Machine, unit: str) -> str:
    return machine.property(unit, "ActiveState")


def _restarts(machine: Machine, unit: str = AGENT) -> int:
    return int(machine.property(unit, "NRestarts"))


def _journal(machine: Machine, unit: str) -> str:
    """Return the journal of a unit since this boot."""
    return machine.run("journalctl", "--no-pager", "-o", "cat", "-b", "-u", unit)


def _tells(machine: Machine, unit: str, event: str) -> list[dict[str, Any]]:
    lines = [line for line in _journal(machine, unit).splitlines() if line.startswith("{")]
    return [found for found in map(json.loads, lines) if found["event"] == event]


def _trains_on(machine: Machine, unit: str = AGENT) -> None:
    machine.wait(lambda: _step(machine, unit) >= 0, "status with a step")
    reached = _step(machine, unit)
    machine.wait(lambda: _step(machine, unit) >= reached + 10, "more steps")


def _step(machine: Machine, unit: str) -> int:
    """Return the step in the agent's status text, -1 if there is none."""
    text = machine.property(unit, "StatusText")
    found = re.fullmatch(r"generation \d+, step (\d+)", text)
    return int(found[1]) if found else -1


def _processes(machine: Machine, unit: str) -> list[int]:
    """Return the unit's pids, as seen inside the machine."""
    group = machine.property(unit, "ControlGroup")
    if not group:
        return []
    files = f"cat /sys/fs/cgroup/systemd{group}/cgroup.procs /sys/fs/cgroup{group}/cgroup.procs"
    return sorted(map(int, machine.run("sh", "-c", f"{files} 2>/dev/null; true").split()))


def _main(machine: Machine) -> int:
    return int(machine.property(AGENT, "MainPID"))


def _workers(machine: Machine) -> list[int]:
    main = _main(machine)
    return [pid for pid in _processes(machine, AGENT) if pid != main]


def _signal(machine: Machine, number: signal.Signals) -> None:
    """Send a signal to the agent's main process only."""
    machine.run("kill", f"-{number.value}", str(_main(machine)))
