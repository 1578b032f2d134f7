"""The bytes of tensors: files, names, weights, hashes."""

from __future__ import annotations

import hashlib

import pytest
import safetensors.torch
import torch
from torch import nn

from gradsync.checkpoint.tensor_file import encode_tensors
from gradsync.checkpoint.weights import clean_name, load_weights, pack_weights, weights_sha256
from gradsync.errors import CheckpointError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint16, torch.uint32, torch.uint64),
]


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("embed.weight", "embed.weight"),
        ("_orig_mod.module.blocks.0._orig_mod.w", "blocks.0.w"),
        ("a._checkpoint_wrapped_module._fsdp_wrapped_module.w", "a.w"),
        ("module", "module"),
        ("a.module", "a.module"),
        ("my_module.w", "my_module.w"),
    ],
)
def test_clean_names(name, clean):
    assert clean_name(name) == clean


def test_the_safetensors_library_reads_what_we_write_and_would_write_the_same(tmp_path):
    tensors = {
        f"{i}.{dtype}": (torch.arange(i * 7) % 2).to(dtype)
        for i, dtype in enumerate(DTYPES, start=1)
    }
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(2, 0), "ü": torch.ones(1)}
    data = b"".join(encode_tensors(tensors))
    loaded = safetensors.torch.load(data)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name], tensor), name
    for length in range(1, 9):
        assert len(next(encode_tensors({"x" * length: torch.ones(1)}))) % 8 == 0
    pieces = list(encode_tensors({"w": torch.zeros(3_000_000)}))  # big tensors come in pieces
    assert max(len(piece) for piece in pieces) == 1 << 23
    assert sum(len(piece) for piece in pieces[1:]) == 12_000_000
    plain = {"b": torch.randn(3, 4), "a": torch.randn(2).bfloat16(), "c": torch.randn(5)}
    assert b"".join(encode_tensors(plain)) == safetensors.torch.save(plain)


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.ones(1, dtype=torch.complex64)],
)
def test_tensors_that_cannot_be_saved_are_named(tensor):
    with pytest.raises(CheckpointError, match=r"tensor 'x' \(torch.*cannot be saved"):
        list(encode_tensors({"x": tensor}))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)


def wrap(module):
    return nn.ModuleDict({"module": module})


def test_weights_go_from_wrapped_to_plain_and_back():
    torch.manual_seed(0)
    source, target = wrap(Tied()), Tied()
    target.embed.weight.data.zero_()
    source["module"].norm.running_mean.fill_(3.0)
    source["module"].norm.num_batches_tracked.fill_(2**40)
    load_weights(target, pack_weights(source.state_dict()))
    assert torch.equal(target.embed.weight, source["module"].embed.weight)
    assert target.head.weight is target.embed.weight
    assert torch.equal(target.norm.running_mean, torch.full((3,), 3.0))
    assert target.norm.num_batches_tracked.item() == 2**40
    target.embed.weight.data.mul_(2)
    load_weights(source, pack_weights(target.state_dict()))
    assert torch.equal(target.embed.weight, source["module"].embed.weight)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_weight_needs_one_of_its_names(name):
    packed = pack_weights(Tied().state_dict())
    del packed[name]
    load_weights(Tied(), packed)
    del packed["embed.weight" if name == "head.weight" else "head.weight"]
    with pytest.raises(CheckpointError, match=r"2 missing .*: embed\.weight, head\.weight"):
        load_weights(Tied(), packed)


def test_another_model_is_refused_with_names_and_counts_and_untouched():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    packed = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    for index in range(2):
        del packed[f"{index}.weight"], packed[f"{index}.bias"]
    packed |= {"2.weight": torch.zeros(3, 2), "2.bias": torch.zeros(2, dtype=torch.int64)}
    packed["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, packed)
    message = str(caught.value)
    assert "4 missing from the checkpoint: 0.weight, 0.bias, 1.weight, …;" in message
    assert "1 unknown to the model: extra;" in message
    assert "2 of another shape or kind: 2.weight (got (3, 2) float32" in message
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    load_weights(low := nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).state_dict())  # dtypes convert
    assert low.weight.dtype == torch.bfloat16


def test_the_hash_is_of_the_bytes_in_order():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([[3, 4]], dtype=torch.int32)
    expected = hashlib.sha256(a.numpy().tobytes() + b.numpy().tobytes()).hexdigest()
    assert weights_sha256([("x", a), ("y", b)]) == expected
    assert weights_sha256({"other": a, "names": b.reshape(2)}.items()) == expected
    assert weights_sha256([("y", b), ("x", a)]) != expected
    assert weights_sha256([("x", a), ("tied", a), ("y", b)]) == expected
    assert weights_sha256([("x", a), ("copy", a.clone()), ("y", b)]) != expected
    negative = torch.tensor([-0.0])
    assert weights_sha256([("z", negative)]) != weights_sha256([("z", negative.abs())])


def test_the_hash_reads_row_major_and_wrapped_or_not_alike():
    matrix = torch.arange(6.0).reshape(2, 3)
    expected = hashlib.sha256(matrix.t().contiguous().numpy().tobytes()).hexdigest()
    assert weights_sha256([("w", matrix.t())]) == expected
    model = Tied()
    wrapped = weights_sha256(wrap(model).named_parameters())
    assert wrapped == weights_sha256(wrap(model)) == weights_sha256(model)
    assert wrapped == weights_sha256(model.named_parameters())
    assert wrapped == weights_sha256(model.named_parameters(remove_duplicate=False))
