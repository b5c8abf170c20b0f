"""Generated code and pages match their sources, and the architecture page names real places."""

from __future__ import annotations

import re
from pathlib import Path

import elastic
from tests import api_doc, metrics_doc, protos, settings_doc


def test_the_generated_modules_match_the_protos(tmp_path: Path) -> None:
    """If this fails, run: python -m tests.protos"""
    protos.generate(tmp_path)
    fresh = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*.py*")}
    assert fresh
    for relative, path in fresh.items():
        assert (protos.ROOT / relative).read_text() == path.read_text(), relative
    kept = protos.ROOT.joinpath("elastic").rglob("*_pb2*.py*")
    stale = {path.relative_to(protos.ROOT) for path in kept if "__pycache__" not in path.parts}
    assert stale == set(fresh)


def test_the_settings_page_matches_the_settings() -> None:
    """If this fails, run: python -m tests.settings_doc"""
    assert settings_doc.TARGET.read_text() == settings_doc.text()


def test_the_metrics_page_matches_the_definitions() -> None:
    """If this fails, run: python -m tests.metrics_doc"""
    assert metrics_doc.TARGET.read_text() == metrics_doc.text()


def test_the_api_page_matches_the_docstrings() -> None:
    """If this fails, run: python -m tests.api_doc"""
    assert api_doc.TARGET.read_text() == api_doc.text()
    assert {kind.__name__ for kind, _ in api_doc.PARTS} >= {*elastic.__all__} - {
        "init",
        "__version__",
    }


def test_the_places_that_the_architecture_page_names_exist() -> None:
    """Its table "Where to look" has names in backquotes, each with the file that contains it."""
    page = (protos.ROOT / "docs" / "ARCHITECTURE.md").read_text()
    table = page.partition("### Where to look")[2].partition("\n### ")[0]
    places = re.findall(
        r"`([\w.]+)`[^|`\[]*(?:`[^`]*`[^|`\[]*)* in \[[^]]*\]\(\.\./([\w/]+\.py)\)", table
    )
    assert len(places) >= 12
    for name, file in places:
        source = (protos.ROOT / file).read_text()
        for part in name.split("."):
            assert re.search(rf"\b{part}\b", source), f"{file} has no {part}"
