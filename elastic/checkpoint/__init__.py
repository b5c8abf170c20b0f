"""Checkpoints on storage: their layout, how they become visible, and how damage is detected."""
