"""Training scripts, one in each function, written without any regard to these tests."""
