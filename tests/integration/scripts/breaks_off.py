"""Leaves the loop long before its end, as an early stop does."""

from toy import Toy

toy = Toy()
for step in toy.session.steps(toy.data, epochs=1_000_000):
    with step:
        for (numbers,) in step.batches():
            step.backward(toy.model(numbers).square().mean())
        toy.optimizer.step()
    if step.index == 4:
        break
print("stopped early")
