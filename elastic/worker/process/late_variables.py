"""Obeys environment variables that a script sets above its `import torch`: in a worker, torch was
imported before the script began, and has read them."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import set_debug_level_from_env
from torch.distributed import distributed_c10d

# What torch, NumPy and their libraries read when they are imported, by prefix. Others, such as
# those of NCCL, gloo and CUDA, are read when they are first needed.
_READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "MKLDNN_", "ONEDNN_", "DNNL_", "OPENBLAS_", "GOTO_", "NPY_"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "AOTINDUCTOR_", "AOT_INDUCTOR_", "TORCH_COMPILE_"),
    *("TORCH_LOGS", "TORCH_TRACE", "TORCH_FAKE_TENSOR_", "PYTORCH_JIT", "TORCH_CPP_LOG_LEVEL"),
    *("TORCH_SHOW_CPP_STACKTRACES", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_"),
    *("TORCH_LINALG_PREFER_", "TORCH_DISTRIBUTED_DEBUG"),
)
_READ_AGAIN = {"TORCHINDUCTOR_CACHE_DIR"}
_THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""Their order is that of torch, if both are set."""
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"


class LateVariables:
    """The environment with which a worker's script begins, and what the script changes in it."""

    def __init__(self) -> None:
        self._before = dict(os.environ)
        self._threads = torch.get_num_threads()

    def obey(self) -> list[str]:
        """Obey what the script has set since then, or since the last call, as far as that is
        possible. Returns the names of the variables that have no effect.

        Raises ValueError for a level of TORCH_DISTRIBUTED_DEBUG that torch does not know, as its
        import would.
        """
        before, self._before = self._before, dict(os.environ)
        late = {
            name
            for name, value in self._before.items()
            if name.startswith(_READ_AT_IMPORT) and before.get(name) != value
        } - _READ_AGAIN
        if _DEBUG in late:
            set_debug_level_from_env()
        if not late.isdisjoint(_THREADS) and torch.get_num_threads() == self._threads:
            self._use_threads()  # else the script has set their number itself
        return sorted(late - {_DEBUG, *_THREADS})

    def obey_when_group_forms(self) -> None:
        """Call `obey` when a script written for torchrun calls `init_process_group`. Local rank 0
        writes to stderr what has no effect."""
        original = distributed.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **named: Any) -> None:
            ignored = self.obey()
            if ignored and os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"elastic: {told(ignored)}", file=sys.stderr)
            original(*args, **named)

        distributed.init_process_group = init_process_group
        distributed_c10d.init_process_group = init_process_group

    def _use_threads(self) -> None:
        for name in _THREADS:
            number = self._before.get(name, "").partition(",")[0].strip()
            if number.isdecimal() and int(number) > 0:
                torch.set_num_threads(int(number))
                return


def told(ignored: list[str]) -> str:
    """Say that these variables have no effect, and what to do."""
    names = ", ".join(ignored)
    return (
        f"the script sets {names} in os.environ, which has no effect in a worker: torch was "
        f"imported before the script began. Set it where elastic starts: {ignored[0]}=... elastic "
        "run (or elastic agent, on each node)"
    )
