"""Training scripts, each a function, written as by authors who do not know of these tests."""
