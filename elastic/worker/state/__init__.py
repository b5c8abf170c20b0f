"""The state of a job in a worker: tracked, compared, undone, saved and restored."""
