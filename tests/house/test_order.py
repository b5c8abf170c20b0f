"""Every module has a docstring and no catch-all name, and every folder is a package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic

PACKAGE = Path(elastic.__file__).parent
FORBIDDEN_NAMES = ("util", "helper", "common", "manager", "misc")


def modules() -> Iterator[Path]:
    """Yield the modules that are not generated."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "v1" not in path.parts and "_pb2" not in path.name:
            yield path


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


MODULES = {name_of(path): path for path in modules()}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_a_docstring(name: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[name].read_text()))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_no_catch_all_name(name: str) -> None:
    for part in Path(name).with_suffix("").parts:
        assert not any(word in part for word in FORBIDDEN_NAMES)


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_tests_that_run_alone_are_where_make_test_looks_for_them() -> None:
    tests = Path(__file__).parents[1]
    alone = [
        p for p in tests.rglob("test_*.py") if "mark.alone" in p.read_text() and p != Path(__file__)
    ]
    assert alone
    assert {path.parent for path in alone} == {tests / "integration"}
