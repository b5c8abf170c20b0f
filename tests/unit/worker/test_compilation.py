"""Compilations of torch.compile are counted, also failed ones, without importing torch._dynamo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.callback import callback_handler

from elastic.worker.compilation import Compilations, untraced


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    found = Compilations()
    found.watch()
    yield found
    torch._dynamo.reset()
    callback_handler.clear()


def compile_with(backend: Callable[[Any, Any], Any]) -> None:
    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))


def test_a_compilation_is_under_way_until_it_ends(compilations: Compilations) -> None:
    seen = []

    def backend(graph: Any, _inputs: Any) -> Any:
        seen.append(compilations.under_way)
        return graph.forward

    compile_with(backend)
    assert seen == [True]
    assert not compilations.under_way
    assert compilations.count == 2


def test_a_failed_compilation_counts_as_ended(compilations: Compilations) -> None:
    def backend(_graph: Any, _inputs: Any) -> Any:
        raise ValueError("no such instruction")

    with pytest.raises(Exception, match="no such instruction"):
        compile_with(backend)
    assert not compilations.under_way
    assert compilations.count == 2


def test_repeated_watch_counts_each_compilation_once(compilations: Compilations) -> None:
    compilations.watch()
    compile_with(lambda graph, _: graph.forward)
    assert compilations.count == 2


def test_watch_registers_again_after_a_reset_of_dynamo(compilations: Compilations) -> None:
    torch._dynamo.reset()
    callback_handler.clear()
    compilations.watch()
    compile_with(lambda graph, _: graph.forward)
    assert compilations.count == 2


def test_what_is_untraced_is_left_alone_but_not_what_it_calls(compilations: Compilations) -> None:
    graphs = []

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @untraced
    def apart(x: torch.Tensor) -> torch.Tensor:
        before = torch._C._distributed_c10d._DistributedBackendOptions()  # Dynamo warns of it
        del before
        return double(x)

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    callback_handler.clear()
    compilations.watch()
    called = torch.compile(lambda x: apart(x + 1) - 1, backend=backend)(torch.ones(2))
    assert called.tolist() == [3.0, 3.0]
    assert [getattr(target, "__name__", "") for (target,) in graphs] == ["add", "mul", "sub"]


@pytest.mark.long
def test_watching_does_not_import_dynamo() -> None:
    script = (
        "import sys; from elastic.worker.compilation import COMPILATIONS; "
        "from elastic.worker.steps_clock import StepsClock; "
        "COMPILATIONS.watch(); StepsClock().begin(); "
        "print('torch._dynamo.callback' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "False"
