"""Fails while it builds what it wants to train."""

from toy import Toy

toy = Toy()
raise ValueError("no such corpus")
