"""The machines of elastic.core in a simulated world: one seed replays one history."""
