"""Several models, or several losses, in a block."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import elastic
from tests.chaos.styles import tasks


def _dataset() -> TensorDataset:
    """Real samples, and the noise that goes with each."""
    real = tasks.regression().tensors[0].clone()
    noise = torch.randn(len(real), 4, generator=torch.Generator().manual_seed(5)).double()
    return TensorDataset(real, noise)


def _networks(session: elastic.Session) -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
    """Generator and discriminator, and the optimizer of each."""
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
    return generator, discriminator, optimizer_g, optimizer_d


def gan(epochs: int) -> None:
    """A GAN: the discriminator steps before the generator's backward."""
    session = elastic.init()
    generator, discriminator, optimizer_g, optimizer_d = _networks(session)
    loss_of = nn.BCEWithLogitsLoss()
    data = elastic.DataLoader(_dataset(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for real, noise in step.batches():
                fake = generator(noise)
                ones = torch.ones_like(real[:, :1])

                optimizer_d.zero_grad()
                on_both = discriminator(torch.cat([real, fake.detach()]))
                step.backward(loss_of(on_both, torch.cat([ones, 1 - ones])))
                optimizer_d.step()

                optimizer_g.zero_grad()
                step.backward(F.softplus(-discriminator(fake)).mean())
                optimizer_g.step()


def wgan(epochs: int) -> None:
    """A Wasserstein GAN: the critic's weights are clamped before the generator's backward."""
    session = elastic.init()
    generator, critic, optimizer_g, optimizer_c = _networks(session)
    data = elastic.DataLoader(_dataset(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for real, noise in step.batches():
                fake = generator(noise)
                optimizer_c.zero_grad()
                on_both = critic(torch.cat([fake.detach(), real]))
                step.backward((on_both[: len(fake)] - on_both[len(fake) :]).mean())
                optimizer_c.step()
                with torch.no_grad():
                    for weight in critic.parameters():
                        weight.clamp_(-0.2, 0.2)

                optimizer_g.zero_grad()
                step.backward(-critic(fake).mean())
                optimizer_g.step()


def gan_toggled(epochs: int) -> None:
    """A GAN that switches requires_grad of its discriminator off while the generator trains."""
    session = elastic.init()
    generator, discriminator, optimizer_g, optimizer_d = _networks(session)
    loss_of = nn.BCEWithLogitsLoss()
    data = elastic.DataLoader(_dataset(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for real, noise in step.batches():
                ones = torch.ones_like(real[:, :1])
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


def gan_two_passes(epochs: int) -> None:
    """A GAN: all micro-batches for the discriminator, then the same again for the generator."""
    session = elastic.init()
    generator, discriminator, optimizer_g, optimizer_d = _networks(session)
    data = elastic.DataLoader(_dataset(), batch_size=2, global_batch=8, seed=3)
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


def actor_critic(epochs: int) -> None:
    """Two models with a loss and an optimizer each; the critic takes two steps a block."""
    session = elastic.init()
    actor = session.distribute(tasks.net())
    critic = session.distribute(tasks.net(hidden=12))
    actor_optimizer = torch.optim.SGD(actor.parameters(), lr=0.01, momentum=0.9)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.003)
    session.track(
        actor=actor,
        critic=critic,
        actor_optimizer=actor_optimizer,
        critic_optimizer=critic_optimizer,
    )
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                for _ in range(2):
                    critic_optimizer.zero_grad()
                    step.backward(F.mse_loss(critic(inputs), targets))
                    critic_optimizer.step()
                with torch.no_grad():
                    value = critic.module(inputs)
                actor_optimizer.zero_grad()
                step.backward(F.mse_loss(actor(inputs), value))
                actor_optimizer.step()


def several_models(epochs: int) -> None:
    """Encoder and two heads in a ModuleDict, each distributed by itself, one optimizer for all."""
    session = elastic.init()
    models = nn.ModuleDict(
        {
            "encoder": session.distribute(tasks.net(outputs=6)),
            "value": session.distribute(tasks.net(6, 8, 1)),
            "rank": session.distribute(tasks.net(6, 8, 1)),
        }
    )
    optimizer = torch.optim.AdamW(models.parameters(), lr=0.003)
    session.track(models=models, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                features = models["encoder"](inputs)
                value = F.mse_loss(models["value"](features), targets)
                rank = F.softplus(-models["rank"](features) * targets.sign()).mean()
                step.backward(value + rank)
            optimizer.step()
            optimizer.zero_grad()
