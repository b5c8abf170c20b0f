"""Runs `elastic torchrun` as `python -m elastic.torchrun`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from elastic.cli.main import main

    sys.argv[1:1] = ["torchrun"]
    main()
