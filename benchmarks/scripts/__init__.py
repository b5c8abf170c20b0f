"""Training scripts that the benchmarks run as jobs, and the modules that they share."""
