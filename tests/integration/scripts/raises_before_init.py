"""Fails before it asks for its place in the job."""

import elastic  # noqa: F401

raise ValueError("no such corpus")
