"""A model whose BatchNorm is handled by us can be saved whole, and comes back an ordinary one."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.sync.batch_norm import CHOICES, choose_batch_norm
from gradsync.sync.replicate import replicate


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_loaded_model_is_an_ordinary_one(choice: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    handle = replicate(model, batch_norm=choice, sync="bucketed")
    loaded = saved_and_loaded(model)
    again = saved_and_loaded(copy.deepcopy(loaded))
    handle.close()
    plain = copy.deepcopy(model).train()
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for each in (loaded, again):
        assert each.train()[1].training
        assert torch.equal(each(inputs), copy.deepcopy(plain)(inputs))
        assert not torch.equal(each[1].running_mean, torch.zeros(3))
        assert not each.eval()[1].training


def test_a_loaded_model_can_be_handled_again() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    comm = SingleCommunicator()
    choose_batch_norm(model, comm, "freeze")
    loaded = saved_and_loaded(model.train())
    handling = choose_batch_norm(loaded.train(), comm, "freeze")
    assert not loaded.train()[0].training
    handling.close()
    assert loaded.train()[0].training
    assert not model.train()[0].training
