"""What turns machines into daemons: driver, timers, supervised tasks, the journal."""
