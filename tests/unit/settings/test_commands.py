"""Rules for every setting of every command."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from elastic.errors import ConfigurationError
from elastic.settings.commands import COMMANDS, Command, options_by_name, owners
from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.doctor import DoctorSettings
from elastic.settings.fields import Option, defaults_of, options_of, relations_of
from elastic.settings.node import NodeSettings
from elastic.settings.operator import OperatorSettings
from elastic.settings.run import RunSettings
from elastic.settings.sources import DeviceCounts, load_settings, parse

ALL = [
    pytest.param(command, option, id=f"{command.table}-{option.name}")
    for command in COMMANDS
    for option in options_of(command.settings)
]
every_setting = pytest.mark.parametrize(("command", "option"), ALL)


def leaves(settings: type) -> Iterator[str]:
    hints = get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name])
        else:
            yield field.name


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.table)
def test_every_field_is_exactly_one_option(command: Command) -> None:
    names = [option.name for option in options_of(command.settings)]
    assert names == list(leaves(command.settings))
    assert len(set(names)) == len(names)


@every_setting
def test_the_help_is_one_line_that_ends_with_a_full_stop(command: Command, option: Option) -> None:
    del command
    assert option.help.endswith(".")
    assert "\n" not in option.help
    assert "[" not in option.help, "rich would take it for markup"


@every_setting
def test_flags_and_variables_are_well_formed(command: Command, option: Option) -> None:
    del command
    flag = r"[A-Z]+" if option.positional else r"--[a-z0-9]+(-[a-z0-9]+)*"
    assert re.fullmatch(flag, option.flag)
    assert re.fullmatch(r"ELASTIC_[A-Z0-9]+(_[A-Z0-9]+)*", option.variable)
    assert not option.flag.startswith("--no-"), "looks like the no to a yes"


@every_setting
def test_the_default_is_within_the_limits(command: Command, option: Option) -> None:
    if option.default is None:
        return
    parsed = parse(option, str(option.default))
    assert parsed == defaults_of(command.settings)[option.name]


@every_setting
def test_every_setting_has_a_limit_that_its_error_names(command: Command, option: Option) -> None:
    """Empty text is refused if the setting needs a value; the error has the limit's phrase."""
    assert option.limits.text
    if option.limits.may_be_empty:
        return
    with pytest.raises(ConfigurationError) as raised:
        load_settings(command.settings, {}, {option.variable: ""}, None, lambda: DeviceCounts(1, 1))
    lines = str(raised.value).splitlines()
    (line,) = [line for line in lines if line.startswith(option.variable)]
    shown = "the value (not shown)" if option.secret else "''"
    assert line == (
        f"{option.variable} (environment): {shown} is not allowed; expected {option.limits.text}"
    )


@every_setting
def test_a_value_of_another_type_is_refused(command: Command, option: Option) -> None:
    del command
    nothing = {} if option.limits.may_be_empty else []
    for wrong in ({"a": 1}, nothing, datetime.date(2000, 1, 1)):
        with pytest.raises(ValueError):  # noqa: PT011 - pydantic's are of this kind
            parse(option, wrong)
    if not option.is_switch:
        with pytest.raises(ValueError):  # noqa: PT011
            parse(option, True)


@every_setting
def test_one_environment_serves_all_commands(command: Command, option: Option) -> None:
    """So all commands with a setting of one name accept the same values for it."""
    del command
    for owner in owners(option.name):
        other = options_by_name(owner)[option.name]
        assert other.limits == option.limits
        assert (other.hint is bool) == (option.hint is bool)
        assert other.secret == option.secret


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.table)
def test_relations_are_between_settings_of_the_command(command: Command) -> None:
    related = {name for relation in relations_of(command.settings) for name in relation.names}
    assert related <= options_by_name(command).keys()


def only(settings: type) -> list[str]:
    """The command's own settings, without the shared groups."""
    return [option.name for option in options_of(settings) if not option.group]


def grouped(settings: type) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for option in options_of(settings):
        if option.group:
            found.setdefault(option.group, []).append(option.name)
    return found


def test_the_sets_of_options_are_frozen() -> None:
    """Before adding to these lists, look for an option that can be derived or dropped instead."""
    assert only(CoordinatorSettings) == [
        "job",
        "run_id",
        "listen",
        "advertise",
        "http_address",
        "metrics_address",
        "min_workers",
        "max_workers",
        "checkpoint_dir",
        "keep_checkpoints",
        "ledger",
        "curve",
        "tensorboard",
        "max_restarts",
        "restart_window_s",
        "gather_timeout_s",
        "join_timeout_s",
        "hang_timeout_s",
        "first_step_timeout_s",
        "pause_timeout_s",
        "hang_factor",
        "straggler_action",
        "stop_grace_s",
        "leader_ttl_s",
        "isolation_timeout_s",
        "agent_grace_s",
        "planned_interval_s",
        "join_debounce_s",
        "quarantine_after",
        "quarantine_window_s",
        "after_end",
        "events_file",
    ]
    assert only(NodeSettings) == [
        "script",
        "args",
        "module",
        "job",
        "run_id",
        "node_name",
        "node_host",
        "machine",
        "worker_port_range",
        "nproc_per_node",
        "spares",
        "checkpoint_dir",
        "checkpoint_every",
        "record_samples",
        "log_dir",
        "keep_logs",
        "state_dir",
        "http_address",
        "metrics_address",
        "console",
        "seed",
        "start_timeout_s",
        "join_timeout_s",
        "silence_timeout_s",
        "first_step_timeout_s",
        "grace_s",
        "drain_timeout_s",
        "preemption_file",
        "preemption_command",
        "preemption_interval_s",
        "on_quarantine",
        "node_ttl_s",
        "isolation_timeout_s",
        "launch",
    ]
    assert only(OperatorSettings) == ["job", "timeout_s"]
    assert only(DoctorSettings) == [
        "job",
        "node_name",
        "node_host",
        "worker_port_range",
        "nproc_per_node",
        "checkpoint_dir",
        "log_dir",
        "state_dir",
        "peers",
        "doctor_address",
        "peer_timeout_s",
        "fail_on",
    ]


@pytest.mark.parametrize(
    "settings", [CoordinatorSettings, NodeSettings, OperatorSettings, DoctorSettings]
)
def test_the_shared_groups_have_the_same_settings_in_every_command(settings: Any) -> None:
    assert grouped(settings) == {
        "TLS": ["tls_ca", "tls_cert", "tls_key", "insecure"],
        "etcd": [
            "etcd",
            "etcd_ca",
            "etcd_cert",
            "etcd_key",
            "etcd_user",
            "etcd_password_file",
            "etcd_password",
            *(["store"] if settings is CoordinatorSettings else []),
        ],
    }
    assert grouped(RunSettings) == {"TLS": grouped(settings)["TLS"]}
