"""Which submodules FSDP2 treats as one."""

from __future__ import annotations

from torch import nn

from gradsync.sync.fsdp import blocks_of


def names(model: nn.Module) -> list[str]:
    name_of = {module: name for name, module in model.named_modules()}
    return [name_of[block] for block in blocks_of(model)]


def test_children_of_lists_are_blocks_and_the_outermost_win() -> None:
    inner = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])})
    model = nn.ModuleDict(
        {
            "stem": nn.Linear(2, 2),
            "layers": nn.ModuleList([nn.Sequential(nn.Linear(2, 2), inner), nn.Linear(2, 2)]),
            "plain": nn.Sequential(nn.Linear(2, 2)),
        }
    )
    assert names(model) == ["layers.0", "layers.1"]


def test_lists_of_lists_and_blocks_without_parameters() -> None:
    model = nn.Module()
    model.grid = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]), nn.Dropout()])
    assert names(model) == ["grid.0.0"]


def test_blocks_that_share_a_parameter_with_others_stay_with_the_root() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model.head = nn.Linear(2, 2)
    model.head.weight = model.layers[1].weight
    assert names(model) == ["layers.0", "layers.2"]


def test_what_two_blocks_hold_leaves_both_to_the_root() -> None:
    model = nn.Module()
    shared = nn.Linear(2, 2).requires_grad_(False)
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), shared) for _ in range(2))
    model.layers.append(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert names(model) == ["layers.2"]
    model.head = model.layers[2][0]
    assert names(model) == []
    model.head = model.layers[2]  # called from two places, it is one unit still
    assert len(blocks_of(model)) == 1
