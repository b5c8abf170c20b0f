"""In the path of jobs that compile nothing: torch's compiler is 40% of what a zygote imports.

Optimizers and DDP import it to tell it what to leave alone, which these stand-ins answer. Another
one is for scipy.signal, a third of what Lightning imports, for metrics of sound.
"""

import sys
import types
from typing import Any


def _leave_alone(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if function is not None else _leave_alone


_compiler = types.ModuleType("torch._dynamo")
_compiler.disable = _leave_alone  # type: ignore[attr-defined]
_compiler.graph_break = lambda *_, **__: None  # type: ignore[attr-defined]
_compiler.OptimizedModule = type("OptimizedModule", (), {})  # type: ignore[attr-defined]

_utils = types.ModuleType("torch._dynamo.utils")
_utils.get_optimize_ddp_mode = lambda: "no_optimization"  # type: ignore[attr-defined]

_rules = types.ModuleType("torch._dynamo.trace_rules")
_rules.clear_lru_cache = lambda: None  # type: ignore[attr-defined]

for _name, _module in (("utils", _utils), ("trace_rules", _rules)):
    setattr(_compiler, _name, _module)
    sys.modules[f"torch._dynamo.{_name}"] = _module
sys.modules["torch._dynamo"] = _compiler

_sound = types.ModuleType("scipy.signal")
_sound.hamming = None  # type: ignore[attr-defined]
sys.modules["scipy.signal"] = _sound
