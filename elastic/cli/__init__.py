"""The command line: the only place that builds concrete adapters."""
