"""Reads the expressions of the dashboards and the rules: where they stand, what they select."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "deploy" / "prometheus" / "elastic.rules.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
_SELECTOR = re.compile(r"(?<![\w:])(?:job:)?elastic_[\w:]+(?:\{[^}]*\})?")
_NAME = re.compile(r"[\w:]+")
_LABELS = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_VALUES = re.compile(r"label_values\((.*), (\w+)\)")


@dataclass(frozen=True, kw_only=True)
class Expression:
    """An expression; `where` names its panel or rule."""

    where: str
    text: str
    shows: tuple[str, ...] = ()
    """The labels that the legend names."""

    @property
    def selectors(self) -> list[str]:
        """Names of series, with their matchers if they have any."""
        return _SELECTOR.findall(self.text)

    @property
    def names(self) -> set[str]:
        """Names of metrics and recorded series, without matchers."""
        return {found[0] for one in self.selectors if (found := _NAME.match(one))}


def of_dashboards() -> list[Expression]:
    """Return the expressions of all panels, annotations and variables."""
    return [e for path in DASHBOARDS for e in _of_board(path.name, json.loads(path.read_text()))]


def recorded() -> dict[str, Expression]:
    """Return the expressions of recording rules, by the name of the recorded series."""
    return {
        rule["record"]: Expression(where=rule["record"], text=rule["expr"])
        for rule in _rules()
        if "record" in rule
    }


def alerts() -> list[Expression]:
    return [
        Expression(where=rule["alert"], text=rule["expr"]) for rule in _rules() if "alert" in rule
    ]


def _rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def _of_board(name: str, board: dict[str, Any]) -> Iterator[Expression]:
    for annotation in board["annotations"]["list"]:
        yield Expression(where=f"{name}: {annotation['name']}", text=annotation["expr"])
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            found = _VALUES.fullmatch(variable["query"])
            assert found is not None, variable
            where = f"{name}: variable {variable['name']}"
            yield Expression(where=where, text=f"count by ({found[2]}) ({found[1]})")
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield Expression(
                where=f"{name}: {panel['title']}",
                text=target["expr"],
                shows=tuple(_LABELS.findall(target["legendFormat"])),
            )


QUICKER = 20
QUICK = "Quick"
"""The ending of names in `quick_rules`: groups, alerts and recorded series."""


def quick_rules() -> str:
    """Return the rules with durations, ranges and limits in seconds divided by QUICKER, for a test
    that cannot wait for hours. The limits of certificates' expiry stay."""
    document = yaml.safe_load(RULES.read_text())

    def seconds(found: re.Match[str]) -> float:
        return int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]

    for group in document["groups"]:
        group["name"] += QUICK
        for rule in group["rules"]:
            text = rule["expr"]
            text = re.sub(r"\[(\d+)([smh])\]", lambda f: f"[{seconds(f) / QUICKER:g}s]", text)
            text = re.sub(r"(?<=[<>] )\d{2,4}\b", lambda f: f"{int(f[0]) / QUICKER:g}", text)
            text = re.sub(r"\b(job:elastic_\w+:\w+)", rf"\1:{QUICK}", text)
            rule["expr"] = text
            if "for" in rule:
                found = re.fullmatch(r"(\d+)([smh])", rule["for"])
                assert found is not None
                rule["for"] = f"{seconds(found) / QUICKER:g}s"
            if "alert" in rule:
                rule["alert"] += QUICK
            else:
                rule["record"] += f":{QUICK}"
    return yaml.safe_dump(document)
