"""Training scripts that the benchmarks run as jobs, and what those scripts share."""
