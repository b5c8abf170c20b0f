"""Where decisions are kept: a small revisioned key-value store."""
