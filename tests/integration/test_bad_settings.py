"""Bad settings are refused before anything starts, with code 78 or 2 and what was wrong."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from elastic.cli import agent
from elastic.errors import ConfigurationError
from tests.etcd_cluster import free_ports
from tests.integration.running import CONFIGURATION, SCRIPTS, USAGE, Place

STEADY = SCRIPTS / "steady.py"


@pytest.mark.parametrize("script", [pytest.param("missing.py", marks=pytest.mark.long), "."])
def test_a_script_that_is_no_file_is_refused(place: Place, script: str) -> None:
    result = place.elastic("run", script)
    assert result.returncode == CONFIGURATION
    assert repr(script) in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "names"),
    [
        (["--nproc-per-nod", "2"], USAGE, ["--nproc-per-nod"]),
        pytest.param(
            ["--nproc-per-node", "none"],
            CONFIGURATION,
            ["--nproc-per-node", "'none'"],
            marks=pytest.mark.long,
        ),
        (
            ["--nproc-per-node", "2", "--min-workers", "3"],
            CONFIGURATION,
            ["--min-workers 3", "--nproc-per-node 2", "2 workers"],
        ),
    ],
)
def test_an_invalid_option_is_refused_with_its_name(
    place: Place, arguments: list[str], code: int, names: list[str]
) -> None:
    result = place.elastic("run", *arguments, STEADY)
    assert result.returncode == code
    assert all(name in result.stderr for name in names), result.stderr


def test_an_unknown_setting_in_the_file_gets_a_suggestion(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "elastic.toml"
    file.write_text("[run]\nspare = 2\n")
    result = place.elastic("run", "--config", file, STEADY)
    assert result.returncode == CONFIGURATION
    assert all(name in result.stderr for name in ("spare ", str(file), "spares")), result.stderr


def test_a_setting_of_another_command_in_the_file_is_refused(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "elastic.toml"
    file.write_text('[job]\netcd = "shared by others"\n[run]\nmax_workers = 2\n')
    result = place.elastic("run", "--config", file, STEADY)
    assert result.returncode == CONFIGURATION
    (line,) = result.stderr.splitlines()
    assert all(name in line for name in ("max_workers ", str(file), "`elastic coordinator`"))


def test_a_misspelt_variable_is_refused_with_the_right_name(place: Place) -> None:
    result = place.elastic("run", STEADY, ELASTIC_CHEKPOINT_DIR="/tmp/x")
    assert result.returncode == CONFIGURATION
    assert "ELASTIC_CHEKPOINT_DIR" in result.stderr
    assert "ELASTIC_CHECKPOINT_DIR" in result.stderr


def test_a_listen_port_in_use_is_refused_and_nothing_is_left(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = place.elastic("run", "--listen", address, "--log-dir", "logs", STEADY)
    assert result.returncode == CONFIGURATION
    assert address in result.stderr
    assert "--listen" in result.stderr
    assert not place.run_directories()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        pytest.param(
            "192.0.2.1:29400", "is not an address of this machine", marks=pytest.mark.long
        ),
        pytest.param(
            "nosuch..invalid:29400", "that is not a valid host name", marks=pytest.mark.long
        ),
        ("taken", "is in use by another process"),
    ],
)
def test_a_coordinator_that_cannot_listen_names_the_address(
    place: Place, address: str, says: str
) -> None:
    """The message is about the address and not about missing certificates."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = address if ":" in address else f"0.0.0.0:{taken.getsockname()[1]}"
        result = place.elastic("coordinator", "--etcd", "http://127.0.0.1:1", "--listen", listen)
    assert result.returncode == CONFIGURATION
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"elastic: cannot listen at {listen}: ")
    assert says in line
    assert "--listen" in line


@pytest.mark.parametrize(
    "command", ["run", *(pytest.param(c, marks=pytest.mark.long) for c in ("coordinator", "agent"))]
)
def test_a_command_that_cannot_serve_http_names_the_address(place: Place, command: str) -> None:
    script = [] if command == "coordinator" else [STEADY]
    many = [] if command == "run" else ["--etcd", "http://127.0.0.1:1"]
    many += ["--state-dir", "state", "--node-host", "127.0.0.1"] if command == "agent" else []
    many += (
        ["--listen", f"127.0.0.1:{free_ports(1)[0]}"]
        if command == "coordinator"
        else ["--log-dir", "logs"]
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        at = ("--http-address", address)
        result = place.elastic(command, *many, *at, *map(str, script))
    assert result.returncode == CONFIGURATION
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"elastic: cannot serve HTTP at {address}: port ")
    assert "--http-address" in line


def test_a_privileged_worker_port_is_refused_to_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses the port, as for users other than root."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(agent.socket, "create_server", refused)
    with pytest.raises(
        ConfigurationError, match="--worker-port-range: this user may not use port 80"
    ):
        agent._require_right_to(80)


@pytest.mark.parametrize(
    "host", [pytest.param("nosuch..invalid", marks=pytest.mark.long), "192.0.2.1"]
)
def test_a_node_host_that_does_not_reach_this_machine_is_refused(place: Place, host: str) -> None:
    """One is a name that fails without a name server, one an address of nobody (RFC 5737)."""
    node = ("--etcd", "http://127.0.0.1:1", "--node-host", host, "--log-dir", "logs")
    result = place.elastic("agent", *node, "--state-dir", "state", "--insecure", STEADY)
    assert result.returncode == CONFIGURATION
    (line,) = result.stderr.splitlines()
    assert f"--node-host {host!r}" in line
    assert "at which other nodes reach this machine" in line


@pytest.mark.parametrize(
    "option",
    [
        ("--nnodes", "2"),
        pytest.param(("--nnodes", "2:4"), marks=pytest.mark.long),
        pytest.param(("--listen", "0.0.0.0:0"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_elastic_run_refuses_options_for_many_nodes(place: Place, option: tuple[str, str]) -> None:
    result = place.elastic("run", *option, "--log-dir", "logs", STEADY)
    assert result.returncode == CONFIGURATION
    (line,) = result.stderr.splitlines()
    assert f"{option[0]} {option[1][0]}" in line
    assert "`elastic coordinator` and `elastic agent`" in line
    assert not (place.files / "logs").exists()


@pytest.mark.parametrize(
    "option",
    [
        "--checkpoint-dir",
        *(pytest.param(o, marks=pytest.mark.long) for o in ("--log-dir", "--ledger")),
    ],
)
def test_a_path_that_is_not_writable_is_refused(place: Place, tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("in the way")
    below = tmp_path / "file" / "below"
    result = place.elastic("run", option, below, STEADY)
    assert result.returncode == CONFIGURATION
    assert str(below) in result.stderr
    assert "Traceback" not in result.stderr
