"""Whether a node is fit for a job: probes at the edge, and checks of what they found."""
