"""A GAN that switches requires_grad of its discriminator off while the generator trains."""

import torch
from torch import nn

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
    loss_of = nn.BCEWithLogitsLoss()
    data = elastic.DataLoader(dataset(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for real, noise in step.batches():
                ones = torch.ones(len(real), 1, dtype=torch.float64)
                discriminator.requires_grad_(True)
                fake = generator(noise)
                optimizer_d.zero_grad()
                on_both = discriminator(torch.cat([real, fake.detach()]))
                step.backward(loss_of(on_both, torch.cat([ones, 1 - ones])))
                optimizer_d.step()

                discriminator.requires_grad_(False)
                optimizer_g.zero_grad()
                step.backward(loss_of(discriminator.module(fake), ones))
                optimizer_g.step()
