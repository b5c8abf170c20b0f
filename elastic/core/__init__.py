"""Pure decisions of the trainer: facts and a seed go in, data comes out, nothing is touched."""
