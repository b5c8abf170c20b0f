"""Coordinator, agent and operator commands: required settings, values and their relations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.node import NodeSettings
from elastic.settings.operator import OperatorSettings
from elastic.settings.run import RunSettings
from elastic.settings.security import SecuritySettings
from elastic.settings.shared import Console, Launch
from elastic.settings.sources import is_given, load_settings, shown
from elastic.settings.store import CoordinatorStoreSettings, StoreKind, StoreSettings
from tests.unit.settings.loading import ETCD, load, problem, problems

MANY = [
    (CoordinatorSettings, "coordinator"),
    (NodeSettings, "agent"),
    (OperatorSettings, "operator"),
]


@pytest.mark.parametrize(("settings", "table"), MANY)
def test_all_settings_but_etcd_have_defaults(settings: type, table: str) -> None:
    store = CoordinatorStoreSettings if table == "coordinator" else StoreSettings
    assert load(settings) == settings(store=store(etcd=("etcd:2379",)))


@pytest.mark.parametrize(("settings", "table"), MANY)
def test_a_missing_required_setting_names_all_ways_to_give_it(settings: type, table: str) -> None:
    told = problem(settings, {})
    assert told.startswith(
        "etcd is missing: give --etcd on the command line, ELASTIC_ETCD in the environment, or "
        f"etcd below [{table}] or [job] in the file of --config; "
    )
    assert told.endswith(
        "or give --store memory, for a job of one coordinator without etcd"
        if table == "coordinator"
        else "http://HOST:PORT or https://HOST:PORT, several separated by commas"
    )


def test_a_coordinator_with_its_own_store_needs_no_etcd_and_uses_none() -> None:
    memory = {"store": "memory"}
    alone = load(CoordinatorSettings, memory)
    assert alone.store == CoordinatorStoreSettings(store=StoreKind.MEMORY)
    # Agents on the same machine share the variables and the file.
    for given in (ETCD, {"etcd": "https://n1:29400", "etcd_ca": "ca.pem"}):
        assert load(CoordinatorSettings, {**given, **memory}).store.store is StoreKind.MEMORY
    assert problem(CoordinatorSettings, {**memory, "etcd": "a b"}).startswith("--etcd (command")
    assert problem(CoordinatorSettings, {"store": "disk"}).endswith("expected one of etcd, memory")


def test_a_wrong_value_of_a_required_setting_is_reported_once() -> None:
    assert problem(NodeSettings, {"etcd": "a b"}).startswith("--etcd (command line): 'a b' is not")


def test_a_required_setting_may_come_from_any_source(tmp_path: Path) -> None:
    file = tmp_path / "elastic.toml"
    file.write_text('[agent]\netcd = "c"\n')
    assert load(NodeSettings, {}, None, file).store.etcd == ("c",)
    assert load(NodeSettings, {}, {"ELASTIC_ETCD": "b"}, file).store.etcd == ("b",)
    assert load(NodeSettings, {"etcd": "a"}, {"ELASTIC_ETCD": "b"}, file).store.etcd == ("a",)


def test_is_given_finds_a_setting_in_any_source(tmp_path: Path) -> None:
    file = tmp_path / "elastic.toml"
    file.write_text("[job]\netcd = 3\n")
    assert is_given("etcd", OperatorSettings, {"etcd": "a"}, {}, None)
    assert is_given("etcd", OperatorSettings, {}, {"ELASTIC_ETCD": "a"}, None)
    assert is_given("etcd", OperatorSettings, {"etcd": None}, {}, file)
    assert not is_given("etcd", OperatorSettings, {"etcd": None}, {"ELASTIC_JOB": "j"}, None)


def test_variables_of_other_commands_are_accepted_silently() -> None:
    environment = {"ELASTIC_MAX_WORKERS": "none", "ELASTIC_OUTPUT": "x", "ELASTIC_LISTEN": "y"}
    assert load(NodeSettings, ETCD, environment) == load(NodeSettings)
    assert load_settings(RunSettings, {}, {"ELASTIC_NODE_TTL_S": "x"}, None) == RunSettings()


def test_a_misspelt_variable_of_any_command_is_reported() -> None:
    assert problem(NodeSettings, ETCD, {"ELASTIC_MAX_WORKER": "1"}).endswith(
        "did you mean ELASTIC_MAX_WORKERS?"
    )


@pytest.mark.parametrize("text", ["true", "yes", "on", "1", True])
def test_every_spelling_of_yes_turns_a_switch_on(text: Any) -> None:
    assert load(NodeSettings, {**ETCD, "record_samples": text}).record_samples


@pytest.mark.parametrize("text", ["false", "no", "off", "0", False])
def test_no_on_the_command_line_wins_over_yes_in_the_environment(text: Any) -> None:
    command_line = {**ETCD, "insecure": text}
    settings = load(NodeSettings, command_line, {"ELASTIC_INSECURE": "true"})
    assert not settings.security.insecure


def test_a_switch_that_is_neither_yes_nor_no_is_refused() -> None:
    assert problem(NodeSettings, ETCD, {"ELASTIC_INSECURE": "perhaps"}) == (
        "ELASTIC_INSECURE (environment): 'perhaps' is not allowed; expected true or false"
    )


def test_settings_of_every_type_are_read_from_text() -> None:
    environment = {
        "ELASTIC_ETCD": "http://a:2379, b ,https://[::1]:2379/",
        "ELASTIC_NODE_NAME": "Node-1.rack_2",
        "ELASTIC_NODE_HOST": "fe80::1",
        "ELASTIC_NPROC_PER_NODE": "auto",
        "ELASTIC_PREEMPTION_COMMAND": "curl -f 'http://notice now'",
        "ELASTIC_LAUNCH": "torchrun",
        "ELASTIC_CONSOLE": "none",
        "ELASTIC_STATE_DIR": "/var/lib/elastic",
    }
    assert load(NodeSettings, {}, environment) == NodeSettings(
        node_name="Node-1.rack_2",
        node_host="fe80::1",
        nproc_per_node=4,
        preemption_command=("curl", "-f", "http://notice now"),
        launch=Launch.TORCHRUN,
        console=Console.NONE,
        state_dir=Path("/var/lib/elastic"),
        store=StoreSettings(etcd=("http://a:2379", "b", "https://[::1]:2379/")),
    )


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        (CoordinatorSettings, "listen", "29400"),
        (CoordinatorSettings, "advertise", "0.0.0.0:29400"),
        (CoordinatorSettings, "advertise", "[::]:29400"),
        (NodeSettings, "worker_port_range", "24000"),
        (NodeSettings, "worker_port_range", "24000:24010"),
        (NodeSettings, "worker_port_range", "24010-24000"),
        (NodeSettings, "worker_port_range", "0-100"),
        (NodeSettings, "worker_port_range", "60000-70000"),
        (CoordinatorSettings, "listen", ":"),
        (CoordinatorSettings, "listen", ":65536"),
        (CoordinatorSettings, "advertise", "0.0.0.0"),
        (CoordinatorSettings, "advertise", "fd00::1"),
        (CoordinatorSettings, "advertise", "http://host"),
        (CoordinatorSettings, "advertise", ":29400"),
        (CoordinatorSettings, "advertise", "host:0"),
        (CoordinatorSettings, "min_workers", "0"),
        (CoordinatorSettings, "max_workers", "0"),
        (CoordinatorSettings, "leader_ttl_s", "1.5"),
        (CoordinatorSettings, "leader_ttl_s", "inf"),
        (CoordinatorSettings, "isolation_timeout_s", "0"),
        (CoordinatorSettings, "agent_grace_s", "-1"),
        (CoordinatorSettings, "planned_interval_s", "nan"),
        (CoordinatorSettings, "quarantine_after", "-1"),
        (CoordinatorSettings, "quarantine_window_s", "0"),
        (NodeSettings, "node_name", "a/b"),
        (NodeSettings, "node_name", "-a"),
        (NodeSettings, "node_name", "a\n"),
        (NodeSettings, "node_name", "n" * 254),
        (NodeSettings, "node_host", "0.0.0.0"),
        (NodeSettings, "node_host", "::"),
        (NodeSettings, "node_host", "host:1"),
        (NodeSettings, "node_host", "[::1]"),
        (NodeSettings, "launch", "mpirun"),
        (NodeSettings, "grace_s", "-1"),
        (NodeSettings, "preemption_command", "'unclosed"),
        (NodeSettings, "preemption_command", " "),
        (NodeSettings, "preemption_interval_s", "0"),
        (NodeSettings, "node_ttl_s", "1"),
        (OperatorSettings, "timeout_s", "0"),
        (OperatorSettings, "etcd", ","),
        (OperatorSettings, "etcd", "a,,b"),
        (OperatorSettings, "etcd", "ftp://a"),
        (OperatorSettings, "etcd", "a:65536"),
        (OperatorSettings, "etcd", "u:p@a:1"),
        (OperatorSettings, "etcd", "http://a/path"),
        (OperatorSettings, "etcd", "::1:2379"),
    ],
)
def test_a_bad_value_is_refused_with_its_flag(settings: type, name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    line = problem(settings, {**ETCD, name: value})
    assert line.startswith(f"{flag} (command line): {shown(value)} is not allowed; expected ")


# Relations


def test_fewer_max_workers_than_min_workers_are_refused() -> None:
    assert problem(
        CoordinatorSettings, {**ETCD, "max_workers": 3}, {"ELASTIC_MIN_WORKERS": "4"}
    ) == (
        "ELASTIC_MIN_WORKERS 4 is more than --max-workers 3; "
        "lower ELASTIC_MIN_WORKERS or raise --max-workers"
    )
    load(CoordinatorSettings, {**ETCD, "min_workers": 3, "max_workers": 3})


def test_an_isolation_timeout_below_the_nodes_ttl_is_refused() -> None:
    assert problem(NodeSettings, {**ETCD, "isolation_timeout_s": 5}) == (
        "--isolation-timeout-s 5 is less than --node-ttl-s 10.0: the node would stop its workers "
        "between two renewals of its lease; raise --isolation-timeout-s or lower --node-ttl-s"
    )
    load(NodeSettings, {**ETCD, "isolation_timeout_s": 5, "node_ttl_s": 5})


def test_tls_files_are_required_together_and_exclude_insecure() -> None:
    assert problem(NodeSettings, {**ETCD, "tls_ca": "ca"}, {"ELASTIC_TLS_KEY": "key"}) == (
        "--tls-ca, ELASTIC_TLS_KEY: mutual TLS also needs --tls-cert"
    )
    files = {"tls_ca": "a", "tls_cert": "c", "tls_key": "k"}
    assert problem(NodeSettings, {**ETCD, **files, "insecure": True}) == (
        "--tls-ca, --tls-cert, --tls-key and --insecure cannot be used together; remove one"
    )
    assert load(NodeSettings, {**ETCD, **files}).security == SecuritySettings(
        tls_ca=Path("a"), tls_cert=Path("c"), tls_key=Path("k")
    )


def test_a_range_of_fewer_ports_than_workers_is_refused() -> None:
    ports = {**ETCD, "worker_port_range": "24000-24003"}
    assert load(NodeSettings, {**ports, "nproc_per_node": 4}).worker_port_range == (24000, 24003)
    (told,) = problems(NodeSettings, {**ports, "nproc_per_node": 5})
    assert told.startswith(
        "--worker-port-range 24000-24003 has 4 ports, and each of the 5 workers of "
        "--nproc-per-node 5 listens at one"
    )


def test_relations_of_a_bad_value_are_not_checked() -> None:
    told = problems(NodeSettings, {**ETCD, "tls_ca": "", "node_ttl_s": "x", "etcd_cert": "c"})
    assert [line.split(" ")[0] for line in told] == ["--tls-ca", "--node-ttl-s", "--etcd-cert"]


# Where the coordinator is reached


@pytest.mark.parametrize(
    ("listen", "advertise", "advertised"),
    [
        (None, None, None),
        ("[::]:1", None, None),
        ("10.0.0.1:1", None, "10.0.0.1:1"),
        ("host:1", None, "host:1"),
        (None, "host:2", "host:2"),
        ("10.0.0.1:1", "host:2", "host:2"),
        (":1", None, None),
        (":1", "host", "host:1"),
        (None, "host", "host:29400"),
        (":1", "[fd00::1]", "[fd00::1]:1"),
    ],
)
def test_the_advertised_address_follows_from_listen_and_advertise(
    listen: str | None, advertise: str | None, advertised: str | None
) -> None:
    settings = load(CoordinatorSettings, {**ETCD, "listen": listen, "advertise": advertise})
    assert settings.advertised == advertised
