"""Fails between elastic.init() and its first step."""

from toy import Toy

toy = Toy()
raise ValueError("no such corpus")
