"""Training scripts as people write them, run under kills: `python -m tests.chaos.styles --help`."""
