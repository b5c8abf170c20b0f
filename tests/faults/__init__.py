"""Jobs in which one system call fails once."""
