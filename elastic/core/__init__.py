"""Pure decision logic: facts, the time and seeds go in, decisions come out, without any I/O."""
