"""What a user finds in `elastic` by looking: its names, by Tab too, and a text on each of them."""

from __future__ import annotations

import inspect
import rlcompleter
from itertools import count, takewhile

import pytest
from torch import nn

import elastic
from elastic.core.data_order import SampleRange
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.step import Means

NAMED = [item for name in elastic.__all__ if inspect.isclass(item := getattr(elastic, name))]
RETURNED = [Means, SampleRange, DistributedModel]
"""What the methods and attributes of those return."""


def test_dir_lists_the_public_names_and_nothing_else() -> None:
    assert dir(elastic) == sorted(elastic.__all__)
    assert len(NAMED) + len(["__version__", "init"]) == len(elastic.__all__)


def test_tab_completes_public_names() -> None:
    completer = rlcompleter.Completer({"elastic": elastic})
    completed = (completer.complete("elastic.", number) for number in count())
    found = {text.rstrip("()") for text in takewhile(bool, completed) if text}
    assert found == {f"elastic.{name}" for name in elastic.__all__ if name != "__version__"}


@pytest.mark.parametrize("kind", [*NAMED, *RETURNED], ids=lambda kind: kind.__name__)
def test_each_public_class_and_each_of_its_methods_has_a_docstring(kind: type) -> None:
    inherited = dir(nn.Module) if issubclass(kind, nn.Module) else []
    members = {n: m for n, m in inspect.getmembers(kind) if n[0] != "_" and n not in inherited}
    methods = {n: m for n, m in members.items() if callable(m) or isinstance(m, property)}
    bare = [name for name, member in methods.items() if not inspect.getdoc(member)]
    assert inspect.getdoc(kind)
    assert bare == []


def test_init_has_a_docstring() -> None:
    assert inspect.getdoc(elastic.init)
