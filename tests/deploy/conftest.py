"""Provides the fixture `place`, where a test's jobs run."""

from tests.integration.conftest import place

__all__ = ["place"]
