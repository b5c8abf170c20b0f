"""Takes batches but never calls step.backward."""

from toy import Toy

toy = Toy()
for step in toy.session.steps(toy.data, epochs=1):
    with step:
        for (numbers,) in step.batches():
            toy.model(numbers)
        toy.optimizer.step()
