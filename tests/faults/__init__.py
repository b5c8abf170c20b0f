"""System calls that fail once, below a job's processes."""
