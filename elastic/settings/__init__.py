"""The settings of every command: their sources, their limits and the validated result."""
