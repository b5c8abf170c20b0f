"""What a worker holds, saves and restores."""
