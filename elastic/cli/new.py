"""`elastic new` writes a script to start from."""

from __future__ import annotations

from pathlib import Path

from elastic.cli.formats import say
from elastic.errors import ConfigurationError, refusal_of

SCRIPT = '''\
"""Trains a small network on numbers that it makes up.

elastic run --nproc-per-node 2 {name}
elastic run --nproc-per-node 2 --checkpoint-dir checkpoints --checkpoint-every 100 {name}
python {name}
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import elastic

EPOCHS = 5


def samples(count, seed):
    """Replace this by a dataset of yours: anything with len() and indices."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 20, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


session = elastic.init()  # a warm spare waits here until it is needed

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
model = session.distribute(net)  # moves it to session.device; takes the options of DDP
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session.track(model=model, optimizer=optimizer)  # everything that has state

data = elastic.DataLoader(samples(4096, seed=1), batch_size=32, global_batch=128, seed=0)
validation = samples(512, seed=2)


def measure(batch):
    inputs, labels = batch
    outputs = model(inputs)
    accuracy = (outputs.argmax(1) == labels).double().mean()
    return {{"loss": F.cross_entropy(outputs, labels), "accuracy": accuracy}}


for step in session.steps(data, epochs=EPOCHS):
    with step:  # leaving this block commits the step; a lost worker costs at most this one
        for inputs, labels in step.batches():
            loss = F.cross_entropy(model(inputs), labels)
            means = step.mean(loss=loss)
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if step.committed:
        step.report(loss=means.loss)
    if step.committed and step.ends_epoch:
        found = session.evaluate(measure, validation, batch_size=256)
        if session.rank == 0:
            print(f"epoch {{step.epoch}}: accuracy {{found['accuracy']:.3f}}")
'''


def write_script(file: Path) -> None:
    """Write the script to a new file. Raises ConfigurationError if it exists, or cannot be made."""
    try:
        with file.open("x") as out:
            out.write(SCRIPT.format(name=file))
    except FileExistsError:
        raise ConfigurationError(
            f"{file} exists already; give another name: elastic new FILE"
        ) from None
    except OSError as error:
        raise refusal_of(
            f"cannot write {file}: {error.strerror}; give another name: elastic new FILE", error
        ) from error
    say(f"{file} is written; start it with: elastic run --nproc-per-node 2 {file}")
