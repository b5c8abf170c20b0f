"""Messages between processes: gRPC between machines, a Unix socket within one."""
