"""What holds for every test."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile

import pytest
from hypothesis import settings

# On a busy machine one example of many takes long now and then, which says nothing of the code;
# pytest-timeout is there for what hangs. All else stays as the profile in use has it: with CI=true
# Hypothesis takes its own, which draws the same examples at every run.
settings.register_profile("patient", settings.default, deadline=None)  # `make test-long`
settings.register_profile("every-run", settings.default, deadline=None, max_examples=25)
settings.load_profile("every-run")

# `elastic status` finds the jobs of a user: those of tests that run at the same time, and of the
# user, are none of a test's business.
_RUNTIME = tempfile.mkdtemp(prefix="elt-", dir="/tmp")  # short, as sockets need it
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME
# As workers have it (cli/run.py): torch asks for the names of its peers, and where no name server
# answers it would wait for 5 s, now and then and in every process anew.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"


_COROUTINE_S = 20.0
# `make test` hands out files in this order. Files that take a second come last, so that all of its
# processes end at the same time.
_QUICK = ("tests/unit/core/", "tests/unit/settings/", "tests/unit/coordinator/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bound what runs in an event loop, which is over soon or hangs; order the files."""
    items.sort(key=lambda item: item.nodeid.startswith(_QUICK))
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("timeout"):
            continue
        if inspect.iscoroutinefunction(item.function):
            item.add_marker(pytest.mark.timeout(_COROUTINE_S))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing is left of that place."""
    del config
    shutil.rmtree(_RUNTIME, ignore_errors=True)
