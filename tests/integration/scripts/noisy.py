"""Trains and prints a lot. The values that it reports have names that `elastic` uses itself."""

from toy import Toy

toy = Toy(samples=4800)


def say(step):
    for number in range(200):
        print(f"step {step.index}: {number} {'x' * 100}", flush=number == 199)
    step.report(step=1.0, epoch=float("nan"), generation=2.0, event=3.0, time=4.0, world_size=5.0)


toy.train(epochs=10**6, pace_s=0.02, in_step=say)
