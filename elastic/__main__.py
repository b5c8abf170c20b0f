"""Runs the `elastic` command, also as `python -m elastic`."""

from __future__ import annotations

import sys

from elastic.version import unfit_system


def main() -> None:
    """Run the command, or say why it cannot run here."""
    if (why := unfit_system(sys.platform)) is not None:
        print(f"error: {why}", file=sys.stderr)
        sys.exit(78)
    from elastic.cli.main import main as command  # imports what only Linux has

    command()


if __name__ == "__main__":
    main()
