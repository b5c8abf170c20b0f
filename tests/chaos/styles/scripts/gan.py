"""A GAN: the discriminator steps before the generator's backward."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import elastic
from tests.chaos.styles import tasks


def dataset() -> TensorDataset:
    """Real samples, and the noise that goes with each."""
    real = tasks.regression().tensors[0].clone()
    noise = torch.randn(len(real), 4, generator=torch.Generator().manual_seed(5)).double()
    return TensorDataset(real, noise)


def main(epochs: int) -> None:
    session = elastic.init()
    generator = session.distribute(tasks.net(4, 16, 8))
    discriminator = session.distribute(tasks.net(8, 16, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.002, betas=(0.5, 0.999))
    session.track(
        generator=generator,
        discriminator=discriminator,
        optimizer_g=optimizer_g,
        optimizer_d=optimizer_d,
    )
    loss_of: nn.Module = nn.BCEWithLogitsLoss()
    data = elastic.DataLoader(dataset(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for real, noise in step.batches():
                fake = generator(noise)
                ones = torch.ones(len(real), 1, dtype=torch.float64)

                optimizer_d.zero_grad()
                on_both = discriminator(torch.cat([real, fake.detach()]))
                step.backward(loss_of(on_both, torch.cat([ones, 1 - ones])))
                optimizer_d.step()

                optimizer_g.zero_grad()
                step.backward(F.softplus(-discriminator(fake)).mean())
                optimizer_g.step()
