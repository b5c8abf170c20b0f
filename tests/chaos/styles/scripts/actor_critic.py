"""Two models with a loss and an optimizer each; the critic takes two optimizer steps a block."""

import torch
from torch.nn import functional as F

import elastic
from tests.chaos.styles import tasks


def main(epochs: int) -> None:
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
