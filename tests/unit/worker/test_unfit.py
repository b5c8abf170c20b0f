"""Parts of torch that cannot work in a changing group are refused with the reason."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from elastic.errors import ConfigurationError
from elastic.worker.group.distributed_model import DistributedModel
from elastic.worker.group.process_group import Group
from elastic.worker.unfit import reason_behind, require_fit

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit, within torch
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer


def test_optimizers_that_are_tied_to_one_group_are_refused(alone: Group) -> None:
    del alone  # so that they can be made
    parameters = list(nn.Linear(2, 1).parameters())
    inner = torch.optim.SGD(parameters, lr=0.1)
    require_fit(inner)
    with pytest.raises(ConfigurationError, match=r"ZeroRedundancyOptimizer .*one rank"):
        require_fit(ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1))
    with pytest.raises(ConfigurationError, match=r"PostLocalSGDOptimizer .*weights .* differ"):
        require_fit(PostLocalSGDOptimizer(inner, PeriodicModelAverager(4)))


def test_their_errors_above_the_loop_have_the_reason_and_others_have_none() -> None:
    """No group exists there, which is what torch complains about."""
    parameters = list(nn.Linear(2, 1).parameters())
    with pytest.raises(ValueError, match="process group") as caught:
        ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    assert "ZeroRedundancyOptimizer" in str(reason_behind(caught.value))
    with pytest.raises(TypeError) as caught_of_post:
        PeriodicModelAverager(4)
    assert "PostLocalSGDOptimizer" in str(reason_behind(caught_of_post.value))
    with pytest.raises(ValueError, match="process group") as caught_of_others:
        torch.distributed.barrier()
    assert reason_behind(caught_of_others.value) is None


def test_join_is_refused() -> None:
    model = DistributedModel(nn.Linear(2, 1), {})
    for join in (lambda: Join([model]), model.join):  # type: ignore[list-item]
        with pytest.raises(ConfigurationError, match=r"Join .*elastic\.DataLoader"):
            join()
