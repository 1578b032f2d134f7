"""Optimizer state by name: the next step has the same bits."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from gradsync.checkpoint.optimizer_state import pack_optimizer, unpack_optimizer
from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.errors import CheckpointError


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 2))


def groups(model, reverse=False):
    """Decayed and not, the last layer's bias left out; optionally in another order."""
    names = dict(model.named_parameters())
    decayed = [p for p in names.values() if p.ndim > 1]
    plain = [p for n, p in names.items() if p.ndim == 1 and not n.endswith("2.bias")]
    order = -1 if reverse else 1
    return [{"params": decayed[::order]}, {"params": plain[::order], "weight_decay": 0.0}]


MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1 + 0.2, betas=(0.8, 0.95), weight_decay=0.3),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


def step(model, optimizer, number, frozen=False):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(x).square().sum().backward()
    if frozen:
        model.get_parameter("0.weight").grad = None
    optimizer.step()


def same_bits(first, second):
    a, b = first.state_dict(), second.state_dict()
    return all(torch.equal(a[name].view(torch.int32), b[name].view(torch.int32)) for name in a)


@pytest.mark.parametrize(("kind", "steps"), [("adamw", 0), *((kind, 3) for kind in MAKERS)])
def test_roundtrip_through_disk_keeps_the_next_steps_bits(kind, steps, tmp_path):
    make = MAKERS[kind]
    model = build()
    optimizer = make(groups(model))
    for number in range(steps):
        step(model, optimizer, number, frozen=True)  # "0.weight" has no state yet
    optimizer.param_groups[0]["lr"] = 0.007
    wrapped = nn.ModuleDict({"module": model})
    tensors, state = pack_optimizer(optimizer, wrapped.named_parameters())
    assert not [name for name in tensors if "module" in name]
    store = CheckpointStore(tmp_path)
    path = store.save(Snapshot(step=1, tensors={"optimizer": tensors}, state={"o": state}))
    loaded = store.load(path)

    other = build()
    other.load_state_dict(model.state_dict())
    resumed = make(groups(other, reverse=True))
    step(other, resumed, 99)  # state that must vanish
    other.load_state_dict(model.state_dict())
    unpack_optimizer(
        resumed, other.named_parameters(), loaded.tensors["optimizer"], loaded.state["o"]
    )
    assert resumed.param_groups[0]["lr"] == 0.007
    assert resumed.param_groups[1]["weight_decay"] == 0.0
    if "betas" in optimizer.param_groups[0]:
        assert resumed.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    for number in range(10, 13):
        step(model, optimizer, number)
        step(other, resumed, number)
        assert same_bits(model, other), number


def packed():
    model = build()
    optimizer = MAKERS["adamw"](groups(model))
    step(model, optimizer, 0)
    tensors, state = pack_optimizer(optimizer, model.named_parameters())
    return model, optimizer, tensors, json.loads(json.dumps(state))


def test_packed_names_and_json():
    _, _, tensors, state = packed()
    assert {"step/0.bias", "exp_avg/1.weight", "exp_avg_sq/2.weight"} <= set(tensors)
    assert tensors["step/0.bias"].item() == 1.0
    assert state["class"] == "AdamW"
    assert state["groups"][0]["params"] == ["0.weight", "1.weight", "2.weight"]
    assert (state["groups"][0]["lr"], state["groups"][0]["betas"]) == (0.1 + 0.2, [0.8, 0.95])
    assert "fused" not in state["groups"][0]


def move(groups):
    groups[1]["params"].remove("0.bias")
    groups[0]["params"].append("0.bias")


UNKNOWN = {"shape": [1], "slots": [], "values": {}}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda _, s: s["params"].pop("1.bias"), "parameter '1.bias' is missing"),
        (lambda _, s: s["params"].update({"9.bias": UNKNOWN}), "parameter '9.bias' is unknown"),
        (
            lambda _, s: s["params"]["1.bias"].update(shape=[4]),
            "parameter '1.bias' has shape (4,), expected (3,)",
        ),
        (lambda t, _: t.pop("exp_avg/1.bias"), "'exp_avg' of parameter '1.bias' is missing"),
        (
            lambda t, _: t.update({"exp_avg/7.bias": torch.zeros(1)}),
            "tensor 'exp_avg/7.bias' belongs to no parameter",
        ),
        (
            lambda _, s: move(s["groups"]),
            "parameter '0.bias' is in another parameter group (2 saved groups, 2 here)",
        ),
        (lambda _, s: s["groups"].append({"params": []}), "3 parameter groups, expected 2"),
        (lambda _, s: s.update({"class": "SGD"}), "is of SGD, expected AdamW"),
    ],
)
def test_state_of_another_run_is_refused_and_nothing_changes(damage, words):
    model, optimizer, tensors, state = packed()
    tensors = {name: tensor + 1 for name, tensor in tensors.items()}
    damage(tensors, state)
    before = {id(p): dict(s) for p, s in optimizer.state.items()}
    with pytest.raises(CheckpointError) as caught:
        unpack_optimizer(optimizer, model.named_parameters(), tensors, state)
    assert words in str(caught.value)
    assert {id(p): dict(s) for p, s in optimizer.state.items()} == before


def test_a_parameter_without_a_name_is_refused():
    model, optimizer, *_ = packed()
    names = [item for item in model.named_parameters() if item[0] != "1.weight"]
    with pytest.raises(CheckpointError, match=r"parameter of shape \(3, 7\) that is not among"):
        pack_optimizer(optimizer, names)


def test_state_keeps_its_own_dtype_and_is_a_copy():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.full((4,), 1 / 3),
        "exp_avg_sq": torch.full((4,), 1e-3),
    }
    tensors, state = pack_optimizer(optimizer, [("w", parameter)])
    again = torch.optim.AdamW([parameter])
    unpack_optimizer(again, [("w", parameter)], tensors, state)
    restored = again.state[parameter]["exp_avg"]
    assert restored.dtype == torch.float32
    assert torch.equal(restored, torch.full((4,), 1 / 3))
    assert restored.data_ptr() != tensors["exp_avg/w"].data_ptr()


def test_a_tensor_learning_rate_is_kept_in_place():
    parameter = nn.Parameter(torch.ones(2))
    rate = torch.tensor(0.25)
    optimizer = torch.optim.AdamW([parameter], lr=rate, foreach=False)
    tensors, state = pack_optimizer(optimizer, [("w", parameter)])
    assert state["groups"][0]["lr"] == 0.25
    rate.fill_(0.5)
    unpack_optimizer(optimizer, [("w", parameter)], tensors, state)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
