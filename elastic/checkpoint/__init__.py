"""Checkpoints on storage: where they lie, how they become visible, and how damage is found."""
