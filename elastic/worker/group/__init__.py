"""The process group: how members form it, compare and exchange their states in it, and leave it."""
