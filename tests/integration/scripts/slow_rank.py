"""Trains STEPS steps of STEP_S seconds; from SINCE on each takes 30% longer in slot RANK, in PART.

Usage: slow_rank.py STEPS STEP_S PART RANK SINCE sleep|work [two]

The extra time is 30% of what steps took before SINCE. sleep, work: how the forward pass and the
extra time pass; work keeps a core busy. PART none: no step takes longer. two: a second model has
a backward pass of its own in each step.
"""

import statistics
import sys
import time

import torch

import elastic

steps, step_s, part = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
rank, since, work = int(sys.argv[4]), int(sys.argv[5]), sys.argv[6] == "work"
BATCH = 4
now, usual_s = 0, step_s
durations_s = []


def spend(seconds):
    if not work:
        time.sleep(seconds)
        return
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.randn(64, 64) @ torch.randn(64, 64)


def spend_more(where, share=1.0):
    if where == part and session.local_rank == rank and now >= since:
        spend(0.3 * usual_s * share)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 3 * BATCH * (steps + 100)

    def __getitem__(self, index):
        spend_more("data", 1 / BATCH)
        return torch.ones(4)


class Model(torch.nn.Linear):
    def forward(self, values):
        spend(0.9 * step_s)
        spend_more("compute")
        return super().forward(values)


class Optimizer(torch.optim.SGD):
    def step(self, *args, **options):
        spend_more("optimizer")
        return super().step(*args, **options)


session = elastic.init()
model = session.distribute(Model(4, 1))
optimizer = Optimizer(model.parameters(), lr=0.01)
session.track(model=model, optimizer=optimizer)
second = None
if sys.argv[7:] == ["two"]:
    second = session.distribute(torch.nn.Linear(4, 1))
    session.track(second=second)
for step in session.steps(elastic.DataLoader(Samples(), batch_size=BATCH), epochs=1):
    now, began = step.index, time.monotonic()
    if now >= steps:
        break
    if now == since:
        usual_s = statistics.median(durations_s[5:] or [step_s])
    with step:
        for batch in step.batches():
            step.backward(model(batch).square().mean())
            if second is not None:
                step.backward(second(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if now < since:
        durations_s.append(time.monotonic() - began)
    spend_more("between_steps")
