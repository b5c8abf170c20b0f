"""A worker's membership as a pure machine: when to join, when to leave, when to abort."""
