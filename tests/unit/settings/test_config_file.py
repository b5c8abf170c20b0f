"""One file serves all commands: the tables that each reads, which wins, and the errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic.settings.commands import COMMANDS
from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.doctor import DoctorSettings
from elastic.settings.node import NodeSettings
from elastic.settings.operator import OperatorSettings
from elastic.settings.run import RunSettings
from tests.settings_doc import TARGET
from tests.unit.settings.loading import ETCD, load, problem, problems


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "elastic.toml"


def test_the_commands_own_table_wins_over_the_shared_one(toml: Path) -> None:
    toml.write_text(
        '[job]\njob = "digits"\njoin-timeout-s = 11\nisolation_timeout_s = 21\n'
        "[coordinator]\nisolation_timeout_s = 22\n[agent]\nisolation-timeout-s = 23\n"
    )
    coordinator = load(CoordinatorSettings, ETCD, None, toml)
    node = load(NodeSettings, ETCD, None, toml)
    assert (coordinator.job, node.job, load(RunSettings, {}, None, toml).job) == ("digits",) * 3
    assert (coordinator.join_timeout_s, node.join_timeout_s) == (11, 11)
    assert (coordinator.isolation_timeout_s, node.isolation_timeout_s) == (22, 23)


def test_the_environment_wins_over_both_tables(toml: Path) -> None:
    toml.write_text("[job]\nspares = 2\n[agent]\nspares = 3\n")
    assert load(NodeSettings, ETCD, {"ELASTIC_SPARES": "4"}, toml).spares == 4


def test_shared_keys_of_other_commands_are_ignored(toml: Path) -> None:
    toml.write_text('[job]\nledger = "/l"\nspares = 2\nnnodes = "nonsense"\n')
    assert load(NodeSettings, ETCD, None, toml).spares == 2
    assert load(CoordinatorSettings, ETCD, None, toml).ledger == Path("/l")
    assert load(OperatorSettings, ETCD, None, toml).job == "job"


def test_tables_of_other_commands_are_ignored(toml: Path) -> None:
    toml.write_text("[agent]\nspares = -1\nnonsense = 1\n[run]\nspares = -1\n")
    assert load(CoordinatorSettings, ETCD, None, toml) == load(CoordinatorSettings)


def test_the_error_for_a_key_of_another_command_names_its_table(toml: Path) -> None:
    toml.write_text('[agent]\nmax_workers = 4\nledger = "/l"\n')
    assert problems(NodeSettings, ETCD, None, toml) == [
        f"max_workers ({toml}, [agent]): is a setting of `elastic coordinator`, "
        "not of `elastic agent`; move it to [coordinator] or [job]",
        f"ledger ({toml}, [agent]): is a setting of `elastic run` and `elastic coordinator`, "
        "not of `elastic agent`; move it to [run] or [job]",
    ]


def test_the_error_for_a_misspelt_key_suggests_the_nearest_allowed_one(toml: Path) -> None:
    toml.write_text("[job]\nmax-worker = 4\n[agent]\nspare = 1\n[coordinater]\n")
    assert problems(NodeSettings, ETCD, None, toml) == [
        f"coordinater ({toml}): unknown setting; did you mean coordinator?",
        f"max-worker ({toml}, [job]): unknown setting; did you mean max-workers?",
        f"spare ({toml}, [agent]): unknown setting; did you mean spares?",
    ]


def test_the_error_for_a_key_like_no_other_names_the_help_of_the_command(toml: Path) -> None:
    toml.write_text("[operator]\nxyzzy = 4\n")
    assert problem(OperatorSettings, ETCD, None, toml) == (
        f"xyzzy ({toml}, [operator]): unknown setting; `elastic status --help` lists the settings"
    )


@pytest.mark.parametrize(
    ("line", "table"),
    [("spares = 1", "agent"), ('job = "digits"', "agent"), ("max_workers = 1", "coordinator")],
)
def test_the_error_for_a_misplaced_key_names_its_table(toml: Path, line: str, table: str) -> None:
    toml.write_text(line)
    key = line.split(" ", maxsplit=1)[0]
    assert problem(NodeSettings, ETCD, None, toml) == (
        f"{key} ({toml}): is outside any table; move it below [{table}]"
    )


def test_a_plain_value_in_the_place_of_a_table_is_refused(toml: Path) -> None:
    toml.write_text("coordinator = 3\n")
    line = f"coordinator ({toml}): 3 is not allowed; expected a table"
    assert problem(NodeSettings, ETCD, None, toml) == line


def test_an_array_sets_a_list_setting(toml: Path) -> None:
    toml.write_text(
        '[job]\netcd = ["http://a:2379", "b"]\n[agent]\npreemption_command = ["x", "a b"]\n'
    )
    settings = load(NodeSettings, {}, None, toml)
    assert settings.store.etcd == ("http://a:2379", "b")
    assert settings.preemption_command == ("x", "a b")


@pytest.mark.parametrize(
    ("text", "shown"), [("[]", "[]"), ("[1]", "[1]"), ('["a", ""]', "['a', '']")]
)
def test_an_empty_array_or_wrong_elements_are_refused(toml: Path, text: str, shown: str) -> None:
    toml.write_text(f"[job]\netcd = {text}\n")
    line = problem(NodeSettings, {}, None, toml)
    assert line.startswith(f"etcd ({toml}, [job]): {shown} is not allowed; expected HOST:PORT, ")


def test_truth_values_set_switches_only(toml: Path) -> None:
    toml.write_text("[job]\ninsecure = true\n[agent]\nrecord_samples = true\nspares = true\n")
    assert problem(NodeSettings, ETCD, None, toml).startswith(f"spares ({toml}, [agent]): True is")
    assert load(OperatorSettings, ETCD, None, toml).security.insecure


def test_a_password_in_the_file_is_refused(toml: Path) -> None:
    toml.write_text('[job]\netcd_user = "u"\netcd-password = "hunter2"\n')
    told, _ = problems(NodeSettings, ETCD, None, toml)
    assert told == (
        f"etcd-password ({toml}, [job]): is not read from this file, since other users may "
        "be able to read it; give etcd_password_file, or ELASTIC_ETCD_PASSWORD in the environment"
    )


def test_the_documented_file_serves_every_command(toml: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", TARGET.read_text(), re.DOTALL)
    toml.write_text(example.replace('"gpu"', '"cpu"'))
    for command in COMMANDS:
        settings = load(command.settings, {}, None, toml)
        assert settings.job == "digits"
    assert load(CoordinatorSettings, {}, None, toml).min_workers == 2
    assert load(NodeSettings, {}, None, toml).nproc_per_node == 4


def test_the_doctor_reads_its_settings_in_the_agents_table(tmp_path: Path) -> None:
    file = tmp_path / "elastic.toml"
    file.write_text(
        '[job]\netcd = "e:2379"\nnproc_per_node = 2\n'
        '[agent]\nnproc_per_node = 4\nnode_host = "10.0.0.1"\ngrace_s = 5\n'
        '[doctor]\nnode_host = "10.0.0.2"\n'
    )
    settings = load(DoctorSettings, {}, {}, file)
    assert (settings.nproc_per_node, settings.node_host) == (4, "10.0.0.2")


def test_the_doctor_reports_a_misspelt_key_of_the_agents_table(tmp_path: Path) -> None:
    file = tmp_path / "elastic.toml"
    file.write_text('[job]\netcd = "e:2379"\n[agent]\nnode_hots = "10.0.0.1"\n')
    assert "node_hots" in problem(DoctorSettings, {}, {}, file)
