"""Messages on their way: gRPC between machines, a local socket within one."""
