"""Writes the chart's README.md and values.schema.json from values.yaml and elastic.settings.

`python -m tests.deploy.chart_documents` also copies alert rules and dashboards into the chart,
because a chart contains only its own directory. Freshness tests call the functions, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from elastic.settings.commands import COMMANDS, options_by_name
from elastic.settings.fields import Option
from tests.deploy.helm import CHART

VALUES = CHART / "values.yaml"
README = CHART / "README.md"
SCHEMA = CHART / "values.schema.json"
FILES = CHART / "files"
_DEPLOY = CHART.parents[1] / "deploy"

OWN_KEYS = {
    "agent": "agents",
    "coordinator": "coordinators",
}
"""By command: the key of the values whose `settings` its pods get."""
SET_BY_CHART = {
    "agent": {
        *("job", "run_id", "script", "args", "node_name", "node_host", "machine"),
        *("nproc_per_node", "spares", "checkpoint_dir", "checkpoint_every", "drain_timeout_s"),
        *("on_quarantine", "log_dir", "state_dir", "http_address"),
    },
    "coordinator": {
        *("job", "run_id", "listen", "advertise", "min_workers", "max_workers"),
        *("checkpoint_dir", "keep_checkpoints", "after_end", "events_file", "http_address"),
    },
}
"""By command: the settings that the chart itself derives from other values."""

_HEAD = """\
# The chart `elastic`

Generated from values.yaml by `python -m tests.deploy.chart_documents`. How to use it:
[docs/KUBERNETES.md](../../docs/KUBERNETES.md).

    helm install gpt helm/elastic --set-file script.inline=train.py \\
        --set etcd.endpoints={etcd-0.etcd:2379} --set checkpoint.dir=s3://bucket/gpt

| value | default | |
|---|---|---|
"""
_NUMBERS: dict[str, dict[str, Any]] = {
    "nodes": {"minimum": 1},
    "agents.http.port": {"minimum": 1, "maximum": 65535},
    "checkpoint.every": {"minimum": 0},
    "checkpoint.keep": {"minimum": 1},
    "tls.days": {"minimum": 1},
    "agents.spares": {"minimum": 0},
    "agents.drainTimeoutSeconds": {"minimum": 1},
    "agents.backoffLimitPerIndex": {"minimum": 0},
    "coordinators.replicas": {"minimum": 1},
    "coordinators.minWorkers": {"minimum": 1},
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "job": {
        "type": "string",
        "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$",
        "maxLength": 40,
    },
    "run": {
        "type": ["string", "integer"],
        "pattern": "^[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$",
        "maxLength": 100,
    },
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "script.args": {"type": "array", "items": {"type": ["string", "number"]}},
    "checkpoint.volume.accessModes": {"type": "array", "items": {"type": "string"}},
    "etcd.endpoints": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "tls.mode": {"enum": ["generated", "certManager", "secret", "insecure"]},
    "agents.kind": {"enum": ["Job", "JobSet", "StatefulSet", "DaemonSet"]},
    "agents.nprocPerNode": {
        "anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["auto", "gpu", "cpu"]}]
    },
    "agents.ttlSecondsAfterFinished": {"type": ["integer", "null"], "minimum": 0},
    "coordinators.maxWorkers": {"type": ["integer", "null"], "minimum": 1},
}
_THRESHOLDS = "monitoring.thresholds."
_OPEN = ("podSecurityContext", "monitoring.dashboardsLabels")
"""Objects that take any key of Kubernetes, although they have a default."""


def readme() -> str:
    return _HEAD + "".join(_row(path, node, about) for path, node, about in _leaves())


def schema() -> str:
    document = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart elastic",
        **_schema_of("", yaml.safe_load(VALUES.read_text())),
    }
    return json.dumps(document, indent=2) + "\n"


def files() -> dict[str, str]:
    """Return the chart's files by name. Dashboards are compact: helm stores each release whole. In
    the rules, a threshold is the name of its alert in angle brackets."""
    dashboards = {
        path.name: json.dumps(json.loads(path.read_text()), separators=(",", ":")) + "\n"
        for path in sorted((_DEPLOY / "grafana").glob("*.json"))
    }
    rules = _DEPLOY / "prometheus" / "elastic.rules.yml"
    return {**dashboards, rules.name: _open_thresholds(rules.read_text())}


def _open_thresholds(rules: str) -> str:
    """Put the names of alerts in the place of the thresholds that values can change."""
    parts = re.split(r"(?=^ +- alert: )", rules, flags=re.MULTILINE)
    thresholds = yaml.safe_load(VALUES.read_text())["monitoring"]["thresholds"]
    for alert, value in thresholds.items():
        (n,) = (n for n, part in enumerate(parts) if f"- alert: {alert}\n" in part)
        parts[n], count = re.subn(rf"(?<=[<>] ){re.escape(f'{value:g}')}\b", f"<{alert}>", parts[n])
        assert count, f"{alert} has no threshold {value}"
    return "".join(parts)


def settings_of(command: str) -> dict[str, Option]:
    """Return the settings that values may pass to a command's pods unchanged."""
    return {
        name: option
        for name, option in all_settings(command).items()
        if not option.group and name not in SET_BY_CHART[command]
    }


def all_settings(command: str) -> Mapping[str, Option]:
    (found,) = (one for one in COMMANDS if one.table == command)
    return options_by_name(found)


def _schema_of(path: str, default: Any) -> dict[str, Any]:
    for command, key in OWN_KEYS.items():
        if path == f"{key}.settings":
            plain = {"type": ["string", "number", "boolean"]}
            names = dict.fromkeys(settings_of(command), plain)
            return {"type": "object", "properties": names, "additionalProperties": False}
    if path in _SPECIAL:
        return _SPECIAL[path]
    if path.startswith(_THRESHOLDS):
        return {"type": "number", "minimum": 0}
    if isinstance(default, bool):
        return {"type": "boolean"}
    if isinstance(default, int):
        return {"type": "integer", **_NUMBERS[path]}
    if isinstance(default, str):
        return {"type": "string"}
    if isinstance(default, list):
        return {"type": "array"}
    assert isinstance(default, dict), path
    if not default or path in _OPEN or path.endswith("resources"):
        return {"type": "object"}
    prefix = f"{path}." if path else ""
    return {
        "type": "object",
        "properties": {
            **({"global": {"type": "object"}} if not path else {}),
            **{key: _schema_of(prefix + key, value) for key, value in default.items()},
        },
        "additionalProperties": False,
    }


def _leaves() -> Iterator[tuple[str, yaml.Node, str]]:
    text = VALUES.read_text()
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    yield from _below("", root, text.splitlines())


def _below(
    prefix: str, mapping: yaml.MappingNode, lines: list[str]
) -> Iterator[tuple[str, yaml.Node, str]]:
    for key, value in mapping.value:
        path, about = prefix + key.value, _comment_above(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and value.value and path not in _OPEN:
            if about:
                yield path, value, about
            yield from _below(f"{path}.", value, lines)
        else:
            yield path, value, about


def _comment_above(lines: list[str], line: int) -> str:
    found: list[str] = []
    while line > 0 and lines[line - 1].strip().startswith("# "):
        line -= 1
        found.insert(0, lines[line].strip()[2:])
    return " ".join(found)


def _row(path: str, node: yaml.Node, about: str) -> str:
    if isinstance(node, yaml.MappingNode) and node.value and path not in _OPEN:
        return f"| `{path}` | | {about} |\n"
    default = json.dumps(yaml.safe_load(yaml.serialize(node)))
    return f"| `{path}` | `{default}` | {about} |\n"


if __name__ == "__main__":
    README.write_text(readme())
    SCHEMA.write_text(schema())
    FILES.mkdir(exist_ok=True)
    for name, content in files().items():
        (FILES / name).write_text(content)
