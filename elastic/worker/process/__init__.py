"""Worker processes: how they are forked, run a script of either kind, and end."""
