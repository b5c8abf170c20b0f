"""The coordinator daemon: the machine of core/coordinator with its store, stream and files."""
