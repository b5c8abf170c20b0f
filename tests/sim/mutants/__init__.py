"""Faults planted in elastic.core, and how many of them the simulator finds."""
