"""Modules that register a buffer in their first forward pass, in the ways that scripts note it."""

from __future__ import annotations

import torch
from torch import nn


class Late(nn.Module):
    """Registers a buffer in its first forward pass, and counts in it."""

    seen: torch.Tensor

    def __init__(self, length: int = 3) -> None:
        super().__init__()
        self.length = length
        self.first: torch.Tensor | None = None
        self.is_ready = False
        self.longest = 0

    def forward(self) -> None:
        self.make()
        self.seen += 1.0

    def make(self) -> None:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(self.length))


class WithFlag(Late):
    def make(self) -> None:
        if not self.is_ready:
            self.register_buffer("seen", torch.zeros(self.length))
            self.is_ready = True


class WithNumber(Late):
    def make(self) -> None:
        if self.longest < self.length:
            self.longest = self.length
            self.register_buffer("seen", torch.zeros(self.length), persistent=False)


class WithNone(Late):
    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self.seen = None  # type: ignore[assignment]

    def make(self) -> None:
        if self.seen is None:
            del self.seen
            self.register_buffer("seen", torch.zeros(self.length))


class InPlaceOfAnother(Late):
    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self.register_buffer("unseen", torch.zeros(length))

    def make(self) -> None:
        if hasattr(self, "unseen"):
            del self.unseen
            self.register_buffer("seen", torch.zeros(self.length))


LATE = [Late, WithFlag, WithNumber, WithNone, InPlaceOfAnother]
