"""A job that trains until it is stopped.

Each rank writes its last commit to a file: steps, world size, and the fingerprint of its weights.
"""

import os
import struct
import sys
import time

import torch

import elastic
from tests.chaos.problem import loss_of
from tests.faults.reference import fingerprint, long_data, new_model

session = elastic.init()
plain = new_model()
model = session.distribute(plain)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
session.track(model=model, optimizer=optimizer)
data = elastic.DataLoader(long_data(), global_batch=8, seed=3)
progress = os.open(sys.argv[1], os.O_WRONLY)
for step in session.steps(data, epochs=1_000_000):
    with step:
        time.sleep(0.02)
        for inputs, targets in step.batches():
            step.backward(loss_of(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    row = struct.pack("=qqd", session.committed, session.world_size, fingerprint(plain))
    os.pwrite(progress, row, len(row) * session.rank)
