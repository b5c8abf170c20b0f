"""The agent as a pure machine: it decides which workers run on its node, and in which slots."""
