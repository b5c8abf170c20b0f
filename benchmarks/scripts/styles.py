"""Ways to train that both sides of a benchmark share: what a script does in and below a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.scripts import mlp

Backward = Callable[[torch.Tensor], None]
Wrap = Callable[[nn.Module], nn.Module]


class Plain:
    """One model and one optimizer.

    wrap: puts DDP, or elastic, around a module. tracked: what a step changes, by name.
    """

    def __init__(self, size: mlp.Size, seed: int, wrap: Wrap, device: torch.device) -> None:
        self.model = wrap(mlp.build(size, seed).to(device))
        self.optimizer = mlp.optimizer(self.model)
        self.tracked: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def train(self, inputs: torch.Tensor, labels: torch.Tensor, backward: Backward) -> torch.Tensor:
        """Train on a batch; return the loss."""
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def below(self) -> None:
        """What the script does below the step."""


class Average(Plain):
    """An exponential average of the weights, which moves below the step."""

    def __init__(self, size: mlp.Size, seed: int, wrap: Wrap, device: torch.device) -> None:
        super().__init__(size, seed, wrap, device)
        self.average = copy.deepcopy(mlp.build(size, seed)).to(device).requires_grad_(False)
        self.tracked["average"] = self.average

    def below(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.model.parameters()), weight=0.01
            )


class Adversarial(Plain):
    """A GAN: the discriminator steps before the generator's backward pass."""

    def __init__(self, size: mlp.Size, seed: int, wrap: Wrap, device: torch.device) -> None:
        super().__init__(size, seed, wrap, device)
        self._inputs = size.inputs
        torch.manual_seed(seed)
        generator = nn.Sequential(
            nn.Linear(size.inputs, size.hidden[0]),
            nn.ReLU(),
            nn.Linear(size.hidden[0], size.inputs),
        )
        self.generator = wrap(generator.to(device))
        self.generators = mlp.optimizer(self.generator)
        self.tracked |= {"generator": self.generator, "generators": self.generators}

    def train(self, inputs: torch.Tensor, labels: torch.Tensor, backward: Backward) -> torch.Tensor:
        del labels
        made = self.generator(torch.randn_like(inputs))
        self.optimizer.zero_grad(set_to_none=True)
        real_or_not = self.model(torch.cat([inputs, made.detach()]))[:, 0]
        is_real = torch.cat([torch.ones(len(inputs)), torch.zeros(len(inputs))])
        backward(
            nn.functional.binary_cross_entropy_with_logits(real_or_not, is_real.to(inputs.device))
        )
        self.optimizer.step()
        self.generators.zero_grad(set_to_none=True)
        loss = nn.functional.softplus(-self.model(made)[:, 0]).mean()
        backward(loss)
        self.generators.step()
        return loss


class Sharpness(Plain):
    """Sharpness-aware minimisation: the first of two backward passes moves the weights."""

    def train(self, inputs: torch.Tensor, labels: torch.Tensor, backward: Backward) -> torch.Tensor:
        backward(nn.functional.cross_entropy(self.model(inputs), labels))
        weights = [p for p in self.model.parameters() if p.grad is not None]
        with torch.no_grad():
            before = [p.clone() for p in weights]
            gradients = [p.grad for p in weights]
            norm = torch.stack(torch._foreach_norm(gradients)).norm()
            torch._foreach_add_(weights, torch._foreach_mul(gradients, 0.05 / norm))
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        backward(loss)
        with torch.no_grad():
            torch._foreach_copy_(weights, before)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


class _TwoEncoders(nn.Module):
    """Momentum contrast: a second encoder follows the first, and a queue keeps its answers."""

    queue: torch.Tensor

    def __init__(self, size: mlp.Size, seed: int) -> None:
        super().__init__()
        self.first, self.second = mlp.build(size, seed), mlp.build(size, seed)
        self.second.requires_grad_(False)
        self.register_buffer("queue", torch.randn(4096, mlp.CLASSES))
        self.at = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        asked = nn.functional.normalize(self.first(inputs), dim=1)
        with torch.no_grad():
            pairs = zip(self.second.parameters(), self.first.parameters(), strict=True)
            for follower, leader in pairs:
                follower.data.mul_(0.99).add_(leader.data, alpha=0.01)
            keys = nn.functional.normalize(self.second(inputs + 0.1), dim=1)
            negative = self.queue.clone()
            at = self.at % len(self.queue)
            self.queue[at : at + len(keys)] = keys[: len(self.queue) - at]
            self.at += len(keys)
        right = (asked * keys).sum(dim=1, keepdim=True)
        return torch.cat([right, asked @ negative.T], dim=1) / 0.1


class Contrast(Plain):
    """MoCo: weights move through `.data` in the forward pass."""

    def __init__(self, size: mlp.Size, seed: int, wrap: Wrap, device: torch.device) -> None:
        module = _TwoEncoders(size, seed).to(device)
        self.model = wrap(module)
        self.optimizer = mlp.optimizer(module.first)
        self.tracked = {"model": self.model, "optimizer": self.optimizer}

    def train(self, inputs: torch.Tensor, labels: torch.Tensor, backward: Backward) -> torch.Tensor:
        return super().train(inputs, torch.zeros_like(labels), backward)


STYLES: dict[str, type[Plain]] = {
    "plain": Plain,
    "ema": Average,
    "gan": Adversarial,
    "sam": Sharpness,
    "moco": Contrast,
}
