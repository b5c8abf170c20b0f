"""A GAN: all micro-batches for the discriminator, then the same ones again for the generator."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks
from tests.chaos.styles.scripts.gan import dataset


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
    data = elastic.DataLoader(dataset(), batch_size=2, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            optimizer_d.zero_grad()
            for real, noise in step.batches():
                fake = discriminator(generator(noise).detach())
                on_real = discriminator(real)
                step.backward(F.softplus(fake).mean() + F.softplus(-on_real).mean())
            optimizer_d.step()

            optimizer_g.zero_grad()
            for _, noise in step.batches():
                step.backward(F.softplus(-discriminator(generator(noise))).mean())
            optimizer_g.step()
