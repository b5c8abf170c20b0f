"""Iterates over the steps without entering them."""

from toy import Toy

toy = Toy()
for _step in toy.session.steps(toy.data, epochs=1):
    pass
