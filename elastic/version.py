"""The version of this package, which the agents and coordinators of a job must share."""

__version__ = "0.1.0"
