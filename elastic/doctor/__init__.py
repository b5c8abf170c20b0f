"""Finds out whether a node is fit for a job: probes collect findings, pure checks judge them."""
