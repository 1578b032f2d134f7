"""`gradsync export`: transformers opens the folder, and computes the same."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gradsync.checkpoint.pieces import FlatPiece, part_stem, piece_of_run, places_of, whole_piece
from gradsync.checkpoint.store import CheckpointStore, Snapshot, resolve
from gradsync.checkpoint.weights import load_weights
from gradsync.commands.cli.main import main
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT
from gradsync.commands.prepare.prepare import prepare
from gradsync.commands.prepare.tokenizer import ByteTokenizer, load_tokenizer
from gradsync.commands.train.foreign import from_hf, hf_config, hf_shape, read_hf, to_llama
from gradsync.data.meta import read_meta
from gradsync.errors import CheckpointError, ConfigError

TEXT = "the quick brown fox, Größe 3 µm \u200b🦊\n\tdef f(x): return x  # <|endoftext|>\n"
FLAGS = (
    *("--steps", "2", "--device", "cpu", "--dtype", "fp32", "--sample-tokens", "0"),
    *("--optim.lr", "0.05", "--optim.warmup-steps", "0"),
    *("--model.block-size", "16", "--micro-batch-size", "2", "--tokens-per-update", "64"),
)


@pytest.fixture(scope="module", params=["byte", "bpe"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("export")
    text = home / "text.txt"
    text.write_text(TEXT * 60)
    vocab = {"tokenizer": "bpe", "vocab_size": 280} if request.param == "bpe" else {}
    prepare([text], home / "data", val_fraction=0.2, **vocab)
    start = home / "start.yaml"
    shape = "n_layer: 2, n_embd: 32, n_head: 4, n_kv_head: 2"
    start.write_text(f"model: {{{shape}, tie_head: {str(request.param == 'byte').lower()}}}")
    out = home / "run"
    words = ["train", str(start), *FLAGS, "--data", str(home / "data"), "--out", str(out)]
    assert main(words) == 0
    return out


def test_transformers_opens_it(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert main(["export", str(run), "--out", str(folder)]) == 0
    assert os.listdir(tmp_path) == ["model"]
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1  # all or none are readable
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    checkpoint, _ = resolve(run)
    snapshot = CheckpointStore(checkpoint.parent).load(checkpoint)
    ours = GPT(GPTConfig(**snapshot.state["model"]))
    load_weights(ours, snapshot.tensors["model"])

    data = run.parent / "data"
    meta = read_meta(data)
    assert meta is not None
    mine = load_tokenizer(meta, data)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == mine.end_of_text_id
    plain = TEXT.replace("<|endoftext|>", "")
    assert tokenizer(plain).input_ids == mine.encode(plain).tolist()
    assert tokenizer.decode(tokenizer(plain).input_ids) == plain

    ids = torch.tensor([mine.encode(plain)[:16].tolist()])
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, ours(ids), rtol=1e-5, atol=1e-5)
    for name, tensor in from_hf(theirs.state_dict(), ours.config).items():
        assert torch.equal(tensor, ours.state_dict()[name])


def test_training_begins_with_its_weights(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the run itself, and from what was made for transformers; then it goes on by itself."""
    folder = tmp_path / "model"
    assert main(["export", str(run), "--out", str(folder)]) == 0
    saved = json.loads((run / "summary.json").read_text())["weights_sha256"]
    data = str(run.parent / "data")
    flags = [str(run.parent / "start.yaml"), *FLAGS, "--data", data]
    hashes = set()
    for name, source in (("a", run), ("b", folder)):
        out = tmp_path / name
        words = ["train", *flags, "--init", str(source), "--out", str(out)]
        assert main([*words, "--steps", "3", "--seed", "5"]) == 0
        said = capsys.readouterr().out
        assert f"weights of {source}" in said
        commands = [f"  gradsync {each} {out}\n" for each in ("sample", "report", "export")]
        assert f"next:\n{''.join(commands)}" in said
        hashes.add(json.loads((out / "summary.json").read_text())["weights_sha256"])
    assert len(hashes) == 1
    assert saved not in hashes

    shutil.rmtree(folder)
    assert main(["train", str(tmp_path / "b" / "config.yaml"), "--steps", "4"]) == 0
    words = ["train", *flags, "--init", str(run), "--model.n-layer", "1"]
    assert main([*words, "--out", str(tmp_path / "c")]) == 2
    assert "model.n_layer is 2 there, 1 here" in capsys.readouterr().err


def test_a_model_saved_before_there_were_others_goes_on(run: Path, tmp_path: Path) -> None:
    """Its checkpoint does not say which architecture it has."""
    found = snapshot_of(run)
    for name in ("architecture", "bias"):
        del found.state["model"][name]
    CheckpointStore(tmp_path / "checkpoints").save(found)
    config = str(run / "config.yaml")
    assert main(["train", config, "--out", str(tmp_path), "--steps", "3"]) == 0
    assert snapshot_of(tmp_path).step == 3
    other = ["--out", str(tmp_path / "other"), "--init", str(tmp_path), "--steps", "1"]
    assert main(["train", config, *other]) == 0


@pytest.mark.parametrize(
    "changes", [{}, {"n_kv_head": 2, "tie_head": False}, {"hidden_dim": 50, "rope_theta": 5e5}]
)
def test_there_and_back(changes: dict[str, object]) -> None:
    shape = replace(GPTConfig(n_layer=11, n_head=4, n_embd=32, vocab_size=61), **changes)
    config = json.loads(json.dumps(hf_config(shape, end_of_text=None)))
    again = hf_shape(config)
    same = {"n_kv_head": shape.num_kv_heads, "hidden_dim": shape.mlp_dim}
    assert again == replace(shape, **same)
    weights = GPT(shape).state_dict()
    assert list(from_hf(to_llama(weights), shape)) == list(weights)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gptj"}, "must be llama or gpt2; got 'gptj'"),
        ({"attention_bias": True}, "attention_bias must be False; got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "of type 'llama3'"),
        ({"head_dim": 64}, "head_dim must be 8; got 64"),
        ({"hidden_size": None}, "not of a llama"),
        ({"rope_parameters": 5}, "not of a llama"),
    ],
)
def test_what_the_decoder_does_not_have_is_refused(changes: dict[str, object], said: str) -> None:
    shape = GPTConfig(n_head=4, n_embd=32)
    with pytest.raises(ConfigError, match=said):
        hf_shape(hf_config(shape, end_of_text=256) | changes)
    theirs = {"model.layers.0.self_attn.q_norm.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"unknown to the model: .*q_norm"):
        from_hf(theirs, shape)
    with pytest.raises(ConfigError, match="no counterpart"):
        to_llama({"blocks.0.extra.weight": torch.zeros(1)})


def gpt2(folder: Path) -> GPT2LMHeadModel:
    """A GPT-2 of transformers, with weights so large that what is in a wrong place shows."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 12, "vocab_size": 257}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, activation_function="gelu")).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(ByteTokenizer().document()))
    return theirs


def test_a_gpt2_of_transformers_comes_and_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, begun = gpt2(tmp_path / "hf"), tmp_path / "hf-run"
    assert main(["export", str(tmp_path / "hf"), "--from", "hf"]) == 0
    assert f"next: gradsync sample {begun}, " in capsys.readouterr().out
    snapshot = snapshot_of(begun)
    ours = GPT(GPTConfig(**snapshot.state["model"])).eval()
    load_weights(ours, snapshot.tensors["model"])
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, ours(ids), rtol=1e-5, atol=1e-5)

    assert main(["train", "--out", str(begun), *FLAGS[:8]]) == 1  # weights alone
    assert "holds a model from elsewhere" in capsys.readouterr().err
    assert main(["sample", str(begun), "--prompt", "To be", "--tokens", "3"]) == 0
    assert "To be" in capsys.readouterr().out

    (tmp_path / "text.txt").write_text(TEXT * 60)
    prepare([tmp_path / "text.txt"], tmp_path / "data", val_fraction=0.2)
    flags = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "more"), "--steps", "1"]
    flags += ["--device", "cpu", "--dtype", "fp32", "--tokens-per-update", "96"]
    assert main(["train", str(begun / "config.yaml"), *flags]) == 0
    assert f"weights of {begun}" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "more"), "--out", str(tmp_path / "back")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    found = snapshot_of(tmp_path / "more").tensors["model"]
    load_weights(ours, found)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, ours(ids), rtol=1e-5, atol=1e-5)

    file = tmp_path / "back" / "model.safetensors"
    hub = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    hub |= {f"h.{block}.attn.bias": torch.ones(1, 1, 12, 12) for block in range(2)}  # causal masks
    save_file(hub, file)
    assert same_bits(read_hf(tmp_path / "back")[1], found)
    (tmp_path / "back" / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["export", str(tmp_path / "back"), "--from", "hf"]) == 2
    assert "activation_function must be 'gelu'; got 'gelu_new'" in capsys.readouterr().err


def test_a_folder_that_holds_something_is_left_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["export", str(run), "--out", str(tmp_path)]) == 2
    assert "holds something already" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["notes.txt"]
    assert main(["export", str(tmp_path)]) == 2
    assert "no checkpoint there" in capsys.readouterr().err


# -- checkpoints of several ranks -----------------------------------------------------------------


def snapshot_of(run: Path) -> Snapshot:
    checkpoint, _ = resolve(run)
    return CheckpointStore(checkpoint.parent).load(checkpoint)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def in_shares(whole: Snapshot, directory: Path, kinds: tuple[str, ...]) -> Path:
    """A checkpoint of the same state as two ranks write it under `zero1` or `fsdp`: each tensor of
    these kinds is cut at an odd element."""
    files: dict[str, dict[str, Tensor]] = {part_stem(rank, 2): {} for rank in range(2)}
    places = {}
    for rank, (stem, held) in enumerate(files.items()):
        pieces = {}
        for kind in kinds:
            for name, tensor in whole.tensors[kind].items():
                half = tensor.numel() // 2 | 1
                run = (half, tensor.numel()) if rank else (0, half)
                shape = tuple(tensor.shape)
                if tensor.dim():
                    piece = piece_of_run(shape, *run)
                elif rank:
                    continue
                else:
                    piece = whole_piece(())
                pieces[f"{kind}/{name}"] = piece
                flat = tensor.view(-1)[slice(*run)]
                held[f"{kind}/{name}"] = (
                    flat if isinstance(piece, FlatPiece) else flat.view(piece.shape)
                )
        places[stem] = places_of(pieces)
    others = {kind: each for kind, each in whole.tensors.items() if kind not in kinds}
    cut = replace(whole, tensors=others | files, places=places)
    return CheckpointStore(directory).save(cut)


@pytest.mark.parametrize("kinds", [("optimizer",), ("model", "optimizer")])
def test_shares_of_ranks_are_exported_whole(
    run: Path, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    cut = in_shares(snapshot_of(run), tmp_path / "run" / "checkpoints", kinds)
    for source, out in ((run, "whole"), (cut, "joined")):
        assert main(["export", str(source), "--out", str(tmp_path / out)]) == 0
    found = load_file(tmp_path / "joined" / "model.safetensors")
    assert same_bits(found, load_file(tmp_path / "whole" / "model.safetensors"))
