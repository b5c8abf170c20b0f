"""Golden transcripts of the machines: REWRITE=1 rewrites them, a reviewer reads the difference."""
