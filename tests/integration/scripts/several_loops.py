"""Trains loops of so many steps each, whatever the data's length, and says where each has ended."""

import sys

from toy import Toy

toy = Toy()
for number in range(3):
    toy.train(epochs=None, max_steps=int(sys.argv[1]), pace_s=0.1)
    print(f"loop {number} ended at {toy.session.committed}")
