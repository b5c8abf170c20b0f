"""A small GPT over bytes, trained on the source text of Python's standard library.

    elastic run --nproc-per-node 2 examples/gpt.py             # a minute or two on two CPU cores
    elastic run --nproc-per-node 2 --checkpoint-dir checkpoints/gpt examples/gpt.py
    python examples/gpt.py                                     # the same, as a world of one
    elastic run --nproc-per-node auto examples/gpt.py --bf16 --megabytes 10 --epochs 5 \\
        --layers 6 --heads 8 --width 512 --context 256 --batch-size 64          # GPUs

At the end it prints the loss on text that it was not trained on, and a sample that it writes.
"""

import argparse
import contextlib
import math
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import elastic

BYTES = 256


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=1, help="times to go through the text")
    parser.add_argument("--megabytes", type=float, default=2.5, help="text to use, at most")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per batch")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per worker and step")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate for one worker")
    parser.add_argument("--layers", type=int, default=2, help="transformer blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads per block")
    parser.add_argument("--width", type=int, default=96, help="width of the embedding")
    parser.add_argument("--context", type=int, default=96, help="length of a window in bytes")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--sample", type=int, default=300, help="bytes to generate at the end")
    return parser.parse_args()


class Block(nn.Module):
    """A transformer block: causal attention, then a perceptron for each byte."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.to_qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, head, time, width of a head)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Logits of the next byte at every position: (batch, time) to (batch, time, 256)."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.to_logits = nn.Linear(width, BYTES)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text) + self.position[: text.shape[1]]
        return self.to_logits(self.norm(self.blocks(x)))


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The text cut into windows: (bytes, the byte that follows each of them)."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def load(megabytes: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The standard library's text: nine tenths to train on, one tenth to validate on."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in files)[: int(megabytes * 1e6)]
    split = len(text) * 9 // 10
    tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensor[:split], tensor[split:]


def loss_of(logits: torch.Tensor, following: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    flat = logits.flatten(0, 1)
    return nn.functional.cross_entropy(flat, following.flatten(), reduction=reduction)


@torch.no_grad()
def validation_loss(session: elastic.Session, model: nn.Module, data: Windows) -> float:
    """Mean loss per byte; each worker computes its share of the windows."""
    total = torch.zeros(2, dtype=torch.float64, device=session.device)
    for index in range(session.rank, len(data), session.world_size):
        text, following = (tensor[None].to(session.device) for tensor in data[index])
        total[0] += loss_of(model(text), following, reduction="sum")
        total[1] += following.numel()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def write(model: GPT, count: int, device: torch.device) -> str:
    """Sample text byte by byte from the model's distribution."""
    text = torch.tensor([list(b"def ")], device=device)
    for _ in range(count):
        chances = model(text[:, -model.context :])[:, -1].softmax(dim=-1)
        text = torch.cat([text, torch.multinomial(chances, 1)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


def main() -> None:
    options = parse()
    session = elastic.init()  # a warm spare waits here
    train, validation = (Windows(text, options.context) for text in load(options.megabytes))
    torch.manual_seed(0)
    net = GPT(options.layers, options.heads, options.width, options.context)
    model = session.distribute(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    session.scale_lr(optimizer, elastic.SqrtScaling(reference_world=1, warmup_steps=20))
    session.track(model=model, optimizer=optimizer, schedule=schedule)
    data = elastic.DataLoader(train, options.batch_size, accumulate=options.accumulate, seed=0)
    autocast = (
        torch.autocast(session.device.type, torch.bfloat16)
        if options.bf16
        else contextlib.nullcontext()
    )

    for step in session.steps(data, epochs=options.epochs):
        with step:  # leaving this block commits the step
            done = (step.epoch + step.samples.start / len(train)) / options.epochs
            while schedule.last_epoch < int(100 * done):  # in percent of the data, not in steps
                schedule.step()
            for text, following in step.batches():  # only the last one all-reduces
                with autocast:
                    loss = loss_of(model(text), following)
                step.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step.report(loss=loss)

    validated = session.run(validation_loss, session, net, validation)
    if session.rank == 0:
        print(f"validation loss {validated:.4f}, {validated / math.log(2):.3f} bits per byte")
        sample = write(net, options.sample, session.device)
        print(f"after {session.committed} steps the model writes:\n{sample}")


if __name__ == "__main__":
    main()
