"""Once FILE exists, only processes that have trained before can load the state."""

import pathlib
import sys

from toy import Toy

marker = pathlib.Path(sys.argv[1])
toy = Toy()


class Picky:
    has_trained = False

    def state_dict(self):
        return {"mood": 1}

    def load_state_dict(self, _state):
        if marker.exists() and not self.has_trained:
            raise KeyError("no such mood")


def note(_step):
    picky.has_trained = True


picky = Picky()
toy.session.track(picky=picky)
toy.train(epochs=1000, pace_s=0.02, in_step=note)
