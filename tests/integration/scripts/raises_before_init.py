"""Fails before it asks for its place in the job."""

raise ValueError("no such corpus")
