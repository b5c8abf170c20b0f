"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# On a busy machine one example of many takes long now and then, which says nothing of the code;
# pytest-timeout is there for what hangs. All else stays as the profile in use has it: with CI=true
# Hypothesis takes its own, which draws the same examples at every run.
settings.register_profile("unhurried", settings.default, deadline=None)
settings.load_profile("unhurried")
