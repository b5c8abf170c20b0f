"""A metric that collects predictions, as a module whose state_dict() grows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.unit.worker.state.undoing import WIDE


class Collecting(nn.Module):
    """Has a list of tensors in its state_dict() beside a parameter and a buffer."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(width))
        self.register_buffer("seen", torch.zeros(()))
        self.collected: list[torch.Tensor] = []

    def update(self) -> None:
        self.seen += 1
        self.collected.append(torch.full((WIDE, WIDE), float(len(self.collected))))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **kwargs), "collected": list(self.collected)}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        own = dict(state_dict)
        self.collected = list(own.pop("collected"))
        return super().load_state_dict(own, *args, **kwargs)
