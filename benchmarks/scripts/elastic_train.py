"""Trains an MLP with elastic and logs each step: elastic's side of the benchmarks.

elastic run --nproc-per-node 3 benchmarks/scripts/elastic_train.py --log-dir DIRECTORY
"""

import os

import elastic
from benchmarks.scripts import mlp
from benchmarks.scripts.arguments import parse
from benchmarks.scripts.step_log import BEGIN, COMMIT, READY, StepLog
from benchmarks.scripts.styles import STYLES
from benchmarks.scripts.turns import Turns


def main() -> None:
    options = parse(__doc__)
    size = mlp.SIZES[options.size]
    session = elastic.init()
    seed = os.getpid() if options.unlike else 0
    style = STYLES[options.style](size, seed, session.distribute, session.device)
    more = {"more": mlp.frozen(options.tracked_mb, seed)} if options.tracked_mb else {}
    session.track(**style.tracked, **more)
    held = bytearray(b"1") * (options.held_mb * 2**20)
    samples = mlp.dataset(size, one_by_one=options.one_by_one)
    data = elastic.DataLoader(samples, batch_size=size.batch_size, drop_last=True)
    log, turns = StepLog(options.log_dir), Turns(options.turns)

    log.mark(READY, 0, generation=0, rank=0, world_size=0)
    for step in session.steps(data, epochs=options.epochs):
        if not turns.wait(step.index):
            break  # in all workers at the same step
        group = {
            "generation": session.generation,
            "rank": session.rank,
            "world_size": session.world_size,
        }
        log.mark(BEGIN, step.index, **group)
        with step:
            for inputs, labels in step.batches():
                loss = style.train(inputs, labels, step.backward)
            step.report(loss=loss)
        style.below()
        if step.committed:
            log.mark(COMMIT, step.index, **group)
    del held


if __name__ == "__main__":
    main()
