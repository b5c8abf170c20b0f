"""Waits for ever before its first step."""

import threading

from toy import Toy

Toy()
threading.Event().wait()
