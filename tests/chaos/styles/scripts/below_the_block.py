"""Styles that work between two blocks, and do not ask whether the step counts."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elastic
from tests.chaos.styles import tasks


def average_below(epochs: int) -> None:
    """An averaged model follows below the block."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    session.track(model=model, optimizer=optimizer, average=average)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model.module)


def scheduler_below(epochs: int) -> None:
    """A scheduler steps below the block."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


def best_by_local_evaluation(epochs: int) -> None:
    """Every worker evaluates by itself, keeps the best weights, and stops when none are better."""
    session = elastic.init()
    model = session.distribute(tasks.net())
    best = copy.deepcopy(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer, best=best)
    inputs, targets = tasks.held_out(session.device)
    session.state.update(best=float("inf"), waited=0)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for mine, wanted in step.batches():
                step.backward(F.mse_loss(model(mine), wanted))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss = round(F.mse_loss(model.module(inputs), targets).item(), 6)
        if loss < session.state["best"]:
            session.state.update(best=loss, waited=0)
            best.load_state_dict(model.module.state_dict())
        else:
            session.state["waited"] += 1
        if session.state["waited"] > 2 * epochs and step.epoch >= epochs // 2:
            break


def one_of_many_weights_rescaled(epochs: int) -> None:
    """One weight of many is put back to its norm below each block."""
    session = elastic.init()
    torch.manual_seed(0)
    hidden = [layer for _ in range(40) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = session.distribute(nn.Sequential(*hidden, nn.Linear(8, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for inputs, targets in step.batches():
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            weight = model.module[40].weight
            weight.mul_(1.5 / weight.norm())


def _with_batch_norm(layers: int) -> nn.Module:
    torch.manual_seed(0)
    hidden = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
    return nn.Sequential(*hidden, nn.Linear(8, 1)).double()


def statistics_computed_again(epochs: int) -> None:
    """After each epoch every worker computes BatchNorm's statistics again, over all samples."""
    session = elastic.init()
    model = session.distribute(_with_batch_norm(12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    inputs, _ = tasks.held_out(session.device)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        with step:
            for mine, wanted in step.batches():
                if len(mine) > 1:
                    model.train()
                else:
                    model.eval()
                step.backward(F.mse_loss(model(mine), wanted))
            optimizer.step()
            optimizer.zero_grad()
        if step.ends_epoch:
            model.train()
            for layer in model.modules():
                if isinstance(layer, nn.BatchNorm1d):
                    layer.reset_running_stats()
            with torch.no_grad():
                for part in inputs.split(30):
                    model.module(part)


def batch_norm_frozen_and_thawed(epochs: int) -> None:
    """BatchNorm is frozen in every second epoch: its mode, its weights and its statistics."""
    session = elastic.init()
    model = session.distribute(_with_batch_norm(12))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(tasks.regression(), batch_size=8, global_batch=8, seed=3)
    for step in session.steps(data, epochs=epochs):
        thawed = step.epoch % 2 == 0
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.train(thawed).requires_grad_(thawed)
        with step:
            for inputs, targets in step.batches():
                if thawed and len(inputs) == 1:
                    model.eval()
                step.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
