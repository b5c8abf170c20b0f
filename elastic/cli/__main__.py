"""`python -m elastic.cli`."""

from elastic.cli.main import main

main()
