"""How a worker process begins and ends, whatever kind of script it runs."""
