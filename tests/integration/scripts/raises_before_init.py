"""Fails before it calls elastic.init()."""

import elastic  # noqa: F401

raise ValueError("no such corpus")
