"""Every weight of a GPT is somewhere, once, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.checkpoint.optimizer_state import pack_optimizer
from gradsync.checkpoint.pieces import PartFiles, part_stem, places_of
from gradsync.checkpoint.reshard import plan_reshard, whole_piece
from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.errors import CheckpointError, ConfigError
from gradsync.models.config import GPTConfig
from gradsync.models.gpt import GPT
from gradsync.parallel.layout import Layout
from gradsync.parallel.norm_places import norm_places
from gradsync.parallel.optimizer_parts import join_states, state_of_part
from gradsync.parallel.partition import Part, check_divisible, cut_tensors, place_tensors
from gradsync.train.config import OptimConfig
from gradsync.train.learner import build_optimizer

SHAPE = GPTConfig(n_layer=5, n_head=4, n_kv_head=2, n_embd=8, vocab_size=10, hidden_dim=12)
LAYOUTS = st.builds(Layout, dp=st.integers(1, 3), pp=st.integers(1, 5), tp=st.sampled_from((1, 2)))


def parts_of(layout: Layout, config: GPTConfig = SHAPE) -> list[Part]:
    places = map(layout.coordinates, range(layout.world_size))
    return [Part(config=config, layout=layout, place=place) for place in places]


@pytest.mark.parametrize("tie_head", [True, False])
def test_weights_are_the_models(tie_head: bool) -> None:
    config = replace(SHAPE, tie_head=tie_head)
    with torch.device("meta"):
        model = GPT(config)
    (part,) = parts_of(Layout(), config)
    expected = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert [(weight.name, weight.shape) for weight in part.weights] == expected
    assert [(name, piece.shape) for name, piece in part.owned().items()] == expected


@settings(max_examples=15)
@given(LAYOUTS, st.booleans())
def test_what_a_replica_owns_is_the_model_once(layout: Layout, tie_head: bool) -> None:
    config = replace(SHAPE, tie_head=tie_head)
    for data in range(layout.dp):
        parts = [part for part in parts_of(layout, config) if part.place.data == data]
        owned = [part.owned() for part in parts]
        for weight in parts[0].weights:
            saved = [pieces[weight.name] for pieces in owned if weight.name in pieces]
            plan_reshard(saved, whole_piece(weight.shape))  # raises unless filled exactly
        for part in parts:
            assert part.owned().items() <= part.pieces().items()
        assert sum(len(part.blocks) for part in parts) == layout.tp * SHAPE.n_layer


@settings(max_examples=15)
@given(LAYOUTS)
def test_the_tied_embedding_is_on_both_ends(layout: Layout) -> None:
    for part in parts_of(layout):
        ends = part.tied_ends
        assert bool(ends) == (layout.pp > 1 and (part.is_first or part.is_last))
        assert ("embed.weight" in part.pieces()) == (part.is_first or part.is_last)
        if ends:
            assert layout.rank(part.place) in ends
            assert len(set(ends)) == 2


@settings(max_examples=15)
@given(LAYOUTS, st.integers(1, 40))
def test_each_norm_has_a_place_of_its_own(layout: Layout, block: int) -> None:
    taken: list[int] = []
    totals = set()
    for part in parts_of(replace(layout, dp=1)):
        (places, total), owned = norm_places(part, block), part.owned()
        totals.add(total)
        for name, begin in places.items():
            count = -(-owned[name].numel // block)
            taken += range(begin, begin + count)
    assert sorted(taken) == list(range(totals.pop()))
    assert not totals


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pp=6), "pp=6 stages need a block each, the model has 5"),
        (Layout(tp=3), "tp=3 does not divide the model's 4 query heads"),
        (Layout(tp=4), "tp=4 does not divide the model's 2 key and value heads"),
    ],
)
def test_models_that_cannot_be_divided_so(layout: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_divisible(SHAPE, layout)
    check_divisible(SHAPE, Layout(pp=5, tp=2))


def trained_model() -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(SHAPE, seed=1)
    optimizer = build_optimizer(model, OptimConfig())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2), Layout(pp=3, tp=2)], ids=str)
def test_files_of_parts_are_read_as_one_model(tmp_path: Path, layout: Layout) -> None:
    model, optimizer = trained_model()
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
    assert join_states(parts[0], states) == ordered(parts[0], state)
    # As a run hands them out: one file at a time.
    store = CheckpointStore(tmp_path)
    handed = PartFiles(list(files), iter(files.values()))
    store.save(Snapshot(step=1, tensors=handed, state={}, places=places))
    found = store.load(tmp_path / "step-00000001").tensors
    assert set(found) == {"model", "optimizer"}
    for name, tensor in whole.items():
        kind, _, rest = name.partition("/")
        assert torch.equal(found[kind][rest], tensor), name


def ordered(part: Part, state: dict) -> dict:
    """Parameters of a group in the model's order, as the trainer's groups have them."""
    names = [weight.name for weight in part.weights]
    groups = [{**g, "params": sorted(g["params"], key=names.index)} for g in state["groups"]]
    return {**state, "groups": groups}


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    (first, _) = parts_of(Layout(tp=2))
    piece = first.owned()["blocks.0.mlp.up.weight"]
    tensors = {"model/blocks.0.mlp.up.weight": torch.zeros(piece.shape)}
    places = {"part-0": places_of({next(iter(tensors)): piece})}
    store = CheckpointStore(tmp_path)
    path = store.save(Snapshot(step=1, tensors={"part-0": tensors}, state={}, places=places))
    with pytest.raises(CheckpointError, match=r"'model/blocks.0.mlp.up.weight'.*48 of the 96"):
        store.load(path)
    path = store.save(
        Snapshot(step=2, tensors={"part-0": tensors, "part-1": tensors}, state={}, places=places)
    )
    with pytest.raises(CheckpointError, match=r"part-1: tensor .* has no place"):
        store.load(path)


def test_files_are_taken_in_order() -> None:
    files = PartFiles(["a", "b"], iter([{}, {}]))
    with pytest.raises(AssertionError, match="in order"):
        files["b"]
