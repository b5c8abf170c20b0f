"""Runs the `elastic` command as `python -m elastic.cli`."""

from elastic.cli.main import main

main()
