"""The coordinator daemon: core/coordinator's state machine with its store, streams and files."""
