"""Runs in a training process: the user's session, its process group and its state."""
