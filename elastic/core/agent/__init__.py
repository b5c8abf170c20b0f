"""The agent as a pure machine: which worker processes run on this node, and in which slots."""
