"""Settings for all tests: Hypothesis' profiles, the environment, time-outs of coroutines."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile

import pytest
from hypothesis import settings

# On a busy machine one of many examples takes long now and then, which says nothing about the code.
# pytest-timeout ends what hangs. All else is as in Hypothesis' default profile: with CI=true it has
# one that draws the same examples in every run.
settings.register_profile("patient", settings.default, deadline=None)  # `make test-long`
settings.register_profile("every-run", settings.default, deadline=None, max_examples=15)
settings.load_profile("every-run")

# `elastic status` finds all jobs of a user. A test must not see those of other tests or the user's.
_RUNTIME = tempfile.mkdtemp(prefix="elt-", dir="/tmp")  # short, as sockets need it
os.environ["XDG_RUNTIME_DIR"] = _RUNTIME
# cli/launch.py does so for workers: torch resolves its peers' names. Where no name server answers,
# every process would now and then wait for 5 s.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"


_COROUTINE_S = 20.0
# `make test` hands out files in this order. Files that take a second come last, so that all of its
# processes end at the same time.
_QUICK = ("tests/unit/core/", "tests/unit/settings/", "tests/unit/coordinator/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and give coroutines a short time-out: they end soon or hang."""
    items.sort(key=lambda item: item.nodeid.startswith(_QUICK))
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("timeout"):
            continue
        if inspect.iscoroutinefunction(item.function):
            item.add_marker(pytest.mark.timeout(_COROUTINE_S))


def pytest_unconfigure(config: pytest.Config) -> None:
    del config
    shutil.rmtree(_RUNTIME, ignore_errors=True)
