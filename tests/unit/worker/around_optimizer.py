"""A Lookahead optimizer for tests: it wraps another optimizer and defines its own state_dict."""

from __future__ import annotations

from typing import Any

import torch


class Lookahead(torch.optim.Optimizer):
    """Lookahead as published. The inner optimizer, which nothing else tracks, holds the fast
    weights' state."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 3) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.every, self.count = inner, every, 0
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        for p in [p for group in self.param_groups for p in group["params"]]:
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.count % self.every == 0:
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        slow, fast = super().state_dict(), self.inner.state_dict()
        return {"count": self.count, "slow": slow, "fast": fast["state"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict(state_dict["slow"])
        groups = state_dict["slow"]["param_groups"]
        self.inner.load_state_dict({"state": state_dict["fast"], "param_groups": groups})
        self.param_groups = self.inner.param_groups
