"""Turns pure machines into daemons: driver, timers, supervised tasks, journal, HTTP pages."""
