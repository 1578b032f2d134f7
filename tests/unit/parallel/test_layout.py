"""Places of ranks in a layout; every weight of a GPT is somewhere, once, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.checkpoint.optimizer_state import pack_optimizer
from gradsync.checkpoint.pieces import InOrder, join, part_stem, places_of
from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT
from gradsync.commands.parallel.layout import (
    Coordinates,
    ModelPart,
    ParallelLayout,
    check_divisible,
    cut_tensors,
    join_states,
    norm_places,
    parse_layout,
    place_tensors,
    state_of_part,
)
from gradsync.commands.train.config import OptimConfig
from gradsync.commands.train.learner import build_optimizer
from gradsync.errors import ConfigError

SHAPE = GPTConfig(n_layer=5, n_head=4, n_kv_head=2, n_embd=8, vocab_size=10, hidden_dim=12)
ANY_LAYOUT = st.builds(
    ParallelLayout, dp=st.integers(1, 5), pp=st.integers(1, 5), tp=st.integers(1, 5)
)
LAYOUTS = st.builds(
    ParallelLayout, dp=st.integers(1, 3), pp=st.integers(1, 5), tp=st.sampled_from((1, 2))
)


@given(ANY_LAYOUT)
def test_every_rank_has_a_place_of_its_own_and_a_layout_reads_back(layout: ParallelLayout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank(place) for place in places] == list(range(layout.world_size))
    assert len(set(places)) == layout.dp * layout.pp * layout.tp
    assert parse_layout(str(layout), layout.world_size) == layout


def test_shards_are_neighbours_and_replicas_furthest_apart() -> None:
    layout = ParallelLayout(dp=2, pp=2, tp=2)
    assert layout.coordinates(1) == Coordinates(data=0, stage=0, shard=1)
    assert layout.coordinates(2) == Coordinates(data=0, stage=1, shard=0)
    assert layout.coordinates(4) == Coordinates(data=1, stage=0, shard=0)
    assert layout.model_ranks == 4


@pytest.mark.parametrize(
    ("text", "world_size", "layout"),
    [
        ("", 3, ParallelLayout(dp=3)),
        ("tp=2", 2, ParallelLayout(tp=2)),
        ("pp=2", 6, ParallelLayout(dp=3, pp=2)),
        (" pp = 2 , dp=1,", 2, ParallelLayout(pp=2)),
    ],
)
def test_what_is_not_said_is_one_or_what_is_left(
    text: str, world_size: int, layout: ParallelLayout
) -> None:
    assert parse_layout(text, world_size) == layout


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ("foo", 4, "got 'foo', expected sizes such as pp=2,dp=2"),
        ("pp=0", 4, "got 'pp=0'"),
        ("pp=3", 4, "dp=1,pp=3,tp=1 is 3 ranks, but there are 4"),
        ("pp=2,dp=2", 2, "is 4 ranks, but there are 2"),
    ],
)
def test_requests_that_make_no_layout(text: str, world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^parallel: .*{message}") as caught:
        parse_layout(text, world_size)
    assert "\n" not in str(caught.value)


# -- parts -----------------------------------------------------------------------------------------


def parts_of(layout: ParallelLayout, config: GPTConfig = SHAPE) -> list[ModelPart]:
    places = map(layout.coordinates, range(layout.world_size))
    return [ModelPart(config=config, layout=layout, place=place) for place in places]


GPT2 = {"architecture": "gpt2", "n_kv_head": None, "hidden_dim": None}


@pytest.mark.parametrize(
    "changes",
    [{"tie_head": True}, {"tie_head": False}, GPT2, {**GPT2, "bias": True, "tie_head": False}],
)
def test_weights_are_the_models(changes: dict[str, Any]) -> None:
    config = replace(SHAPE, **changes)
    with torch.device("meta"):
        model = GPT(config)
    (part,) = parts_of(ParallelLayout(), config)
    expected = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert [(weight.name, weight.shape) for weight in part.weights] == expected
    assert [(name, piece.shape) for name, piece in part.owned().items()] == expected


@settings(max_examples=15)
@given(LAYOUTS, st.booleans())
def test_what_a_replica_owns_is_the_model_once(layout: ParallelLayout, tie_head: bool) -> None:
    config = replace(SHAPE, tie_head=tie_head)
    for data in range(layout.dp):
        parts = [part for part in parts_of(layout, config) if part.place.data == data]
        for weight in parts[0].weights:
            owned = (part.owned().get(weight.name) for part in parts)
            boxes = [(box, torch.empty(box.shape)) for box in owned if box is not None]
            assert join(weight.name, boxes).shape == weight.shape  # raises unless filled exactly
        for part in parts:
            assert part.owned().items() <= part.pieces().items()
            ties = tie_head and layout.pp > 1 and (part.is_first or part.is_last)
            assert (part.other_end is not None) == ties
            if part.other_end is not None:
                assert "embed.weight" in part.pieces()
                (other,) = (p for p in parts if layout.rank(p.place) == part.other_end)
                assert other.other_end == layout.rank(part.place) != part.other_end
        assert sum(len(part.blocks) for part in parts) == layout.tp * SHAPE.n_layer


@settings(max_examples=15)
@given(LAYOUTS, st.integers(1, 40))
def test_each_norm_has_a_place_of_its_own(layout: ParallelLayout, block: int) -> None:
    taken: list[int] = []
    for part in parts_of(replace(layout, dp=1)):
        (places, total), owned = norm_places(part, block), part.owned()
        for name, begin in places.items():
            taken += range(begin, begin - (-prod(owned[name].shape) // block))
    assert sorted(taken) == list(range(total))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ParallelLayout(pp=6), "pp=6 stages need a block each, the model has 5"),
        (ParallelLayout(tp=3), "tp=3 does not divide the model's 4 query heads"),
        (ParallelLayout(tp=4), "tp=4 does not divide the model's 2 key and value heads"),
    ],
)
def test_models_that_cannot_be_divided_so(layout: ParallelLayout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_divisible(SHAPE, layout)
    check_divisible(SHAPE, ParallelLayout(pp=5, tp=2))


# -- their files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [ParallelLayout(pp=2), ParallelLayout(tp=2), ParallelLayout(pp=3, tp=2)], ids=str
)
def test_files_of_parts_are_read_as_one_model(tmp_path: Path, layout: ParallelLayout) -> None:
    model = GPT(SHAPE, seed=1)
    optimizer = build_optimizer(model, OptimConfig())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    kept, state = pack_optimizer(optimizer, model.named_parameters())
    whole = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    whole |= {f"optimizer/{name}": tensor for name, tensor in kept.items()}
    shapes = [(name, tuple(tensor.shape)) for name, tensor in whole.items()]
    files, places, states = {}, {}, []
    parts = parts_of(layout)
    for index, part in enumerate(parts):
        here = cut_tensors(part.pieces(), shapes)
        cut = {name: whole[name][piece.slices].clone() for name, piece in here.items()}
        saved = place_tensors(part, [(name, tuple(t.shape)) for name, t in cut.items()])
        stem = part_stem(index, len(parts))
        files[stem] = {name: cut[name] for name in saved}
        places[stem] = places_of(saved)
        states.append(state_of_part(part, state))
    # Parameters of a group in the model's order, as the trainer's groups have them.
    names = [weight.name for weight in parts[0].weights]
    groups = [{**g, "params": sorted(g["params"], key=names.index)} for g in state["groups"]]
    assert join_states(parts[0], states) == {**state, "groups": groups}
    # As a run hands them out: one file at a time.
    store = CheckpointStore(tmp_path)
    handed = InOrder([*files], files.__getitem__)
    store.save(Snapshot(step=1, tensors=handed, state={}, places=places))
    found = store.load(tmp_path / "step-00000001").tensors
    assert set(found) == {"model", "optimizer"}
    for name, tensor in whole.items():
        kind, _, rest = name.partition("/")
        assert torch.equal(found[kind][rest], tensor), name
