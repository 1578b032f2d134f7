"""BatchNorm must be chosen; `sync` equals one rank with the concatenated batch."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError
from gradsync.sync.batch_norm import CHOICES, choose_batch_norm
from gradsync.sync.replicate import replicate
from support.thread_ranks import run_thread_ranks

ALONE = SingleCommunicator()


def net(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, **options), nn.ReLU(), nn.GroupNorm(1, 3)
    )


def test_the_choice_must_be_made_by_name() -> None:
    model = nn.ModuleDict({"bn1": nn.BatchNorm1d(2), "body": net()})
    with pytest.raises(ConfigError) as caught:
        choose_batch_norm(model, ALONE, None)
    first, *lines = str(caught.value).splitlines()
    assert first == "the model has BatchNorm (bn1, body.1): say which"
    assert [line.split("'")[1] for line in lines] == list(CHOICES)
    with pytest.raises(ConfigError, match=r"\(bn1, body.1\)"):
        choose_batch_norm(model.eval(), ALONE, None)  # it will train one day
    many = nn.Sequential(*[nn.BatchNorm1d(2) for _ in range(9)])
    with pytest.raises(ConfigError, match=re.escape("(0, 1, 2, 3 and 5 more)")):
        choose_batch_norm(many, ALONE, None)
    with pytest.raises(ConfigError, match=r"unknown batch_norm='global' \(there are: sync, "):
        choose_batch_norm(model, ALONE, "global")


def test_models_that_need_no_choice() -> None:
    plain = nn.Sequential(nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.InstanceNorm1d(2))
    for choice in (None, *CHOICES):
        assert choose_batch_norm(plain, ALONE, choice).choice is None
    frozen = net()
    frozen[1].eval()
    assert choose_batch_norm(frozen, ALONE, None).choice is None


def test_freeze_outlasts_train_and_is_undone() -> None:
    model = net()
    names = list(model.state_dict())
    with torch.no_grad():
        model(torch.randn(4, 2, 5, 5))
    statistics = model[1].running_mean.clone()
    handling = choose_batch_norm(model, ALONE, "freeze")
    twin = copy.deepcopy(model)
    for each in (model, twin):
        assert each.train().training
        each(torch.randn(4, 2, 5, 5)).square().sum().backward()
        assert torch.equal(each[1].running_mean, statistics)
        assert each[1].weight.grad is not None
    assert list(model.state_dict()) == names
    handling.close()
    for each in (model, twin):
        each(torch.randn(4, 2, 5, 5))
    assert not torch.equal(model[1].running_mean, statistics)
    assert torch.equal(twin[1].running_mean, statistics)  # the copy was not closed


CASES = {
    "2d": (nn.BatchNorm2d, {}, (6, 3, 4, 5), torch.float32),
    "1d": (nn.BatchNorm1d, {"momentum": None}, (9, 3), torch.float32),
    "1d with length": (nn.BatchNorm1d, {"momentum": 0.3}, (7, 3, 4), torch.float64),
    "3d": (nn.BatchNorm3d, {"eps": 0.1}, (5, 3, 2, 2, 2), torch.float32),
    "plain": (nn.BatchNorm2d, {"affine": False}, (6, 3, 2, 2), torch.float32),
    "no running": (nn.BatchNorm2d, {"track_running_stats": False}, (6, 3, 2, 2), torch.float32),
}
CUTS = {2: (0.7, 0.3), 3: (0.5, 0.0, 0.5), 4: (0.1, 0.2, 0.3, 0.4)}


def one_round(layer: nn.Module, x: Tensor, comm: Any, rows: range) -> dict[str, Tensor]:
    """Two training forwards and backwards on `rows` of x; gradients and buffers."""
    choose_batch_norm(layer, comm, "sync" if comm else "local")
    part = x[rows.start : rows.stop].clone().requires_grad_()
    weights = torch.linspace(-1.0, 2.0, x.numel(), dtype=x.dtype).reshape(x.shape)
    for factor in (1.0, 2.0):
        outputs = layer(factor * part + 1)
        (outputs.square() * weights[rows.start : rows.stop]).sum().backward()
    found = {"x": part.grad, "outputs": outputs.detach()}
    found |= {name: p.grad for name, p in layer.named_parameters()}
    found |= {name: b.clone() for name, b in layer.named_buffers()}
    evaluated = layer.eval()(part)
    return {**found, "evaluated": evaluated.detach()}


def rows_of(rank: int, world_size: int, num_rows: int) -> range:
    edges = [round(num_rows * sum(CUTS[world_size][:k])) for k in range(world_size + 1)]
    return range(edges[rank], edges[rank + 1])


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_sync_equals_the_concatenated_batch(case: str, world_size: int) -> None:
    kind, options, shape, dtype = CASES[case]
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(shape, generator=generator, dtype=dtype) + 2
    start = kind(3, **options).to(dtype)
    if start.weight is not None:
        with torch.no_grad():
            start.weight.copy_(torch.tensor([1.0, 0.5, -2.0]))
    oracle = one_round(copy.deepcopy(start), x, None, range(len(x)))
    results = run_thread_ranks(
        lambda rank, group: one_round(
            copy.deepcopy(start),
            x,
            ProcessGroupCommunicator(group),
            rows_of(rank, world_size, len(x)),
        ),
        world_size,
    )
    parameters = {name for name, _ in start.named_parameters()}
    for name, expected in oracle.items():
        parts = [result[name] for result in results]
        if name == "evaluated" and case == "no running":
            continue  # statistics of each rank's own batch, in torch as here
        if name in ("x", "outputs", "evaluated"):
            found = torch.cat(parts)
        elif name in parameters:
            found = torch.stack(parts).sum(0)  # as gradient synchronisation does
        else:
            assert all(torch.equal(part, parts[0]) for part in parts)
            found = parts[0]
        rtol = 1e-9 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(found, expected, rtol=rtol, atol=20 * rtol, msg=name)


def test_half_precision_is_summed_wide() -> None:
    x = (100 + torch.randn(64, 3, 4, 4)).bfloat16()
    layer = nn.BatchNorm2d(3)
    twin = copy.deepcopy(layer)
    choose_batch_norm(layer, ALONE, "sync")
    outputs = layer(x)
    assert outputs.dtype == torch.bfloat16
    torch.testing.assert_close(outputs.float(), twin(x.float()), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(layer.running_var, twin.running_var, rtol=1e-4, atol=0.0)


def test_sync_on_one_rank_is_undone_and_copied() -> None:
    model = net()
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    handling = choose_batch_norm(model, ALONE, "sync")
    assert handling.own_buffers == [model[1]]
    twin = copy.deepcopy(model)  # as for a moving average of weights
    x = torch.randn(4, 2, 5, 5)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    assert twin[1].num_batches_tracked == 0
    twin(x)
    assert model[1].num_batches_tracked == 1
    assert list(model.state_dict()) == names
    handling.close()
    assert "forward" not in model[1].__dict__
    assert not model._forward_pre_hooks


def test_one_value_per_channel_is_refused_on_all_ranks() -> None:
    def work(rank: int, group: object) -> str:
        layer = nn.BatchNorm1d(3)
        choose_batch_norm(layer, ProcessGroupCommunicator(group), "sync")
        with pytest.raises(ConfigError) as caught:
            layer(torch.ones(rank, 3))
        return str(caught.value)

    for message in run_thread_ranks(work, 2):
        assert "more than one value per channel in training; got 1 over all ranks" in message


def test_unequal_numbers_of_forwards_are_an_error_not_a_hang() -> None:
    """Rank 1 has two leaves, the others one."""

    def work(rank: int, group: object) -> str:
        model = net()
        handling = choose_batch_norm(model, ProcessGroupCommunicator(group), "sync")
        try:
            for _ in range(2 if rank == 1 else 1):
                loss = model(torch.randn(2, 2, 5, 5)).sum()
                handling.meet("a backward")
                loss.backward()
            handling.meet("the step's end")
        except ConfigError as error:
            return str(error)
        return ""

    told = run_thread_ranks(work, 3)
    assert told == [told[0]] * 3
    assert "ranks 0,2 came to the step's end but rank 1 came to a forward" in told[0]
    assert "multiple of the number of ranks" in told[0]


def test_evaluation_on_one_rank_waits_for_nobody() -> None:
    def work(rank: int, group: object) -> None:
        model = net()
        handling = choose_batch_norm(model, ProcessGroupCommunicator(group), "sync")
        if rank == 0:
            model.eval()(torch.randn(2, 2, 5, 5))
        handling.meet("the step's end")

    run_thread_ranks(work, 2)


# Dynamo looks at `.grad` of what flows between graphs; it hides torch's warning, not an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_models_synchronise_too() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    plain = copy.deepcopy(model)
    choose_batch_norm(model, ALONE, "sync")
    x, weights = torch.randn(8, 4), torch.randn(8, 3)  # weighted: else normalising leaves no slope
    try:
        outputs = torch.compile(model, backend="aot_eager")(x)
        (outputs * weights).sum().backward()
    finally:
        torch.compiler.reset()
    expected = plain(x)
    (expected * weights).sum().backward()
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model[1].running_var, plain[1].running_var)


# -- saved whole, a model comes back an ordinary one -----------------------------------------------


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_loaded_model_is_an_ordinary_one(choice: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    handle = replicate(model, batch_norm=choice, strategy="bucketed")
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


def test_layers_of_torchs_own_synchronisation_do_what_was_chosen() -> None:
    """Under `local` none of them meets the other ranks, in training or in evaluation."""
    x = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    plain = net()
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))

    def work(rank: int, group: Any) -> tuple[Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(converted)
        comm = ProcessGroupCommunicator(group)
        sync = replicate(model, comm=comm, batch_norm="local", strategy="bucketed")
        sync.backward(model(x).square().sum(), weight=6, reduction="sum")
        sync.step(torch.optim.SGD(model.parameters(), lr=0.0))
        out = model.eval()(x).detach()
        sync.close()
        assert "forward" not in model[1].__dict__
        return out, {name: buffer.clone() for name, buffer in model.named_buffers()}

    plain(x)
    for out, buffers in run_thread_ranks(work, 2):
        torch.testing.assert_close(out, plain.eval()(x))
        torch.testing.assert_close(buffers, dict(plain.train().named_buffers()))
    assert choose_batch_norm(converted, ALONE, "local").replaced
    assert not choose_batch_norm(plain, ALONE, "local").replaced


def test_a_second_derivative_under_sync_is_refused_by_name() -> None:
    """As a gradient penalty takes it; the first one is not."""
    layer = nn.BatchNorm1d(3)
    choose_batch_norm(layer, ALONE, "sync")
    x = torch.randn(4, 3, requires_grad=True)
    torch.autograd.grad(layer(x).square().sum(), x)
    with pytest.raises(ConfigError, match=r"batch_norm='sync' on rank 0.*gradient penalty"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
