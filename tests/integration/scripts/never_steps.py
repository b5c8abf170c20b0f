"""Builds everything and trains nothing."""

from toy import Toy

Toy()
