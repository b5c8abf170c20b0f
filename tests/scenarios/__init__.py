"""Golden transcripts of the machines: REWRITE=1 rewrites them, and a reviewer reads the diff."""
