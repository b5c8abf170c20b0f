"""A worker's membership and its script's way through the groups, as pure machines."""
