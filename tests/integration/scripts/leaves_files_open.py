"""Writes to files that it leaves open, which Python flushes as it ends.

Usage: leaves_files_open.py FILE [raise]
"""

import csv
import gzip
import sys


class Packed:
    """Closes its file when it is finalized."""

    def __init__(self, path):
        self.file = gzip.open(path, "wt")  # noqa: SIM115 - left open

    def __del__(self):
        self.file.close()


rows = open(sys.argv[1], "w")  # noqa: SIM115 - left open
csv.writer(rows).writerows([step, 1.0 / (step + 1)] for step in range(5))
packed = Packed(f"{sys.argv[1]}.gz")
packed.file.write("loss" * 50)
if len(sys.argv) > 2:
    raise ValueError("the script fails")
