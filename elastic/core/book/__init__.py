"""The book of a run: losses and their cost, a fold over what the machine has handled."""
