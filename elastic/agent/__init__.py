"""The agent daemon: the machine of core/agent with its zygote, sockets and logs."""
