"""The key-value store that keeps a job's decisions: the interface, two adapters, and users."""
