"""`gradsync export --from nanogpt`: the run computes what nanoGPT's model does, goes on training,
and leaves for transformers; what is no such checkpoint is refused in a line."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from gradsync.checkpoint.store import CheckpointStore, resolve
from gradsync.checkpoint.weights import load_weights
from gradsync.commands.cli.main import main
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT, generate
from gradsync.commands.train.foreign import read_hf
from gradsync.commands.train.state import saved_model
from support.foreign_files import Stranger

TEXT = "To be, or not to be: that is the question.\n" * 60
FILE = "model.safetensors"
LETTERS = {letter: number for number, letter in enumerate(sorted(set(TEXT)))}
ARGS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": len(LETTERS)}
SETTINGS = {"dataset": "letters", "learning_rate": 1e-3, "out_dir": "out", "compile": True}


class Theirs(nn.Module):
    """The architecture that the checkpoint is of, from its description: GPT-2 with an exact GELU,
    biases or none, and one table for tokens and head."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        width = ARGS["n_embd"]

        def block() -> nn.ModuleDict:
            attn = {"c_attn": (width, 3 * width), "c_proj": (width, width)}
            mlp = {"c_fc": (width, 4 * width), "c_proj": (4 * width, width)}
            return nn.ModuleDict(
                {
                    **{norm: nn.LayerNorm(width, bias=bias) for norm in ("ln_1", "ln_2")},
                    "attn": nn.ModuleDict({n: nn.Linear(*s, bias=bias) for n, s in attn.items()}),
                    "mlp": nn.ModuleDict({n: nn.Linear(*s, bias=bias) for n, s in mlp.items()}),
                }
            )

        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(ARGS["vocab_size"], width),
                "wpe": nn.Embedding(ARGS["block_size"], width),
                "h": nn.ModuleList(block() for _ in range(ARGS["n_layer"])),
                "ln_f": nn.LayerNorm(width, bias=bias),
            }
        )
        self.lm_head = nn.Linear(width, ARGS["vocab_size"], bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # large, so that whatever is in a wrong place shows
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            q, k, v = (
                part.unflatten(-1, (ARGS["n_head"], -1)).transpose(1, 2)
                for part in block["attn"]["c_attn"](block["ln_1"](x)).split(ARGS["n_embd"], -1)
            )
            weights = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            ahead = torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1)
            seen = weights.masked_fill(ahead, -math.inf).softmax(-1) @ v
            x = x + block["attn"]["c_proj"](seen.transpose(1, 2).flatten(2))
            hidden = F.gelu(block["mlp"]["c_fc"](block["ln_2"](x)))
            x = x + block["mlp"]["c_proj"](hidden)
        return self.lm_head(parts["ln_f"](x))


def save(path: Path, *, bias: bool = True, prefix: str = "") -> Theirs:
    """A `ckpt.pt` as nanoGPT's train.py writes it, after three steps of its optimizer."""
    model = Theirs(bias=bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.arange(24).view(2, 12) % ARGS["vocab_size"]).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint = {
        "model": {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": {**ARGS, "bias": bias, "dropout": 0.1},
        "iter_num": 3,
        "best_val_loss": torch.tensor(3.2),
        "config": SETTINGS,
    }
    torch.save(checkpoint, path)
    return model.eval()


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def ours_of(run: Path) -> GPT:
    checkpoint, _ = resolve(run)
    snapshot = CheckpointStore(checkpoint.parent).load(checkpoint)
    assert snapshot.step == 3
    model = GPT(saved_model(snapshot, checkpoint))
    load_weights(model, snapshot.tensors["model"])
    return model.eval()


def letters(folder: Path) -> Path:
    """nanoGPT's data directory of a text, letter by letter."""
    folder.mkdir(parents=True)
    ids = np.array([LETTERS[letter] for letter in TEXT], dtype=np.uint16)
    ids[:2000].tofile(folder / "train.bin")
    ids[2000:].tofile(folder / "val.bin")
    back = {number: letter for letter, number in LETTERS.items()}
    meta = {"vocab_size": len(LETTERS), "itos": back, "stoi": LETTERS}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module."])
def test_the_logits_are_the_same(
    bias: bool, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = save(tmp_path / "ckpt.pt", bias=bias, prefix=prefix)
    assert main(["export", str(tmp_path / "ckpt.pt"), "--from", "nanogpt"]) == 0
    run = tmp_path / "ckpt-run"
    assert capsys.readouterr().out.splitlines() == [
        f"written to {run}",
        f"next: gradsync sample {run}, gradsync train {run}/config.yaml",
    ]
    ours = ours_of(run)
    assert ours.config.num_params() == sum(each.numel() for each in theirs.parameters())
    assert (ours.config.bias, ours.config.dropout) == (bias, 0.1)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(ARGS["vocab_size"], (4, 12), generator=generator)
    with torch.no_grad():
        expected, found = theirs(tokens), ours(tokens)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        ids = generate(ours, [1, 2], 20, temperature=0)
        for end in range(2, len(ids)):
            assert theirs(torch.tensor([ids[max(0, end - 12) : end]]))[0, -1].argmax() == ids[end]


def test_it_goes_on_and_leaves_for_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampled letter by letter, trained, and exported, all from the folder in which nanoGPT ran."""
    monkeypatch.chdir(tmp_path)
    data, theirs = letters(Path("data/letters")), save(Path("ckpt.pt"), bias=False)
    assert main(["export", "ckpt.pt", "--from", "nanogpt", "--out", "runs/begun"]) == 0
    assert main(["sample", "runs/begun", "--prompt", "To be", "--tokens", "9", "--json"]) == 0
    text = json.loads(capsys.readouterr().out.splitlines()[-1])["text"]
    assert text.startswith("To be")
    assert len(text) == 14

    flags = ["--device", "cpu", "--dtype", "fp32", "--out", "runs/more", "--steps", "7"]
    flags += ["--tokens-per-update", "96", "--optim.warmup-steps", "3", "--sample-tokens", "9"]
    assert main(["train", "runs/begun/config.yaml", *flags]) == 0
    said = capsys.readouterr().out
    assert "weights of runs/begun" in said
    assert "next:\n  gradsync report runs/more\n" in said  # its end knows no tokenizer
    found = json.loads(Path("runs/more/summary.json").read_text())
    config = found["config"]
    assert config["data"] == str(data)
    before = F.cross_entropy(
        theirs(torch.tensor([[LETTERS[c] for c in "To be, or n"]])).flatten(0, 1),
        torch.tensor([LETTERS[c] for c in "o be, or no"]),
    )
    assert found["val_loss"] < before.item()
    assert main(["train", "runs/begun/config.yaml", *flags, "--steps", "8"]) == 0  # resumed
    assert "step 7" in capsys.readouterr().out

    assert main(["export", "runs/more"]) == 0
    hf = Path("runs/more/hf")
    loaded = "loaded by: transformers.AutoModelForCausalLM.from_pretrained('runs/more/hf')\n"
    assert capsys.readouterr().out.endswith(loaded)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(hf), AutoTokenizer.from_pretrained(hf)
    ids = torch.tensor([tokenizer("not to be").input_ids])
    assert ids.tolist() == [[LETTERS[letter] for letter in "not to be"]]
    assert tokenizer.decode(ids[0]) == "not to be"
    checkpoint, _ = resolve(Path("runs/more"))
    snapshot = CheckpointStore(checkpoint.parent).load(checkpoint)
    ours = GPT(GPTConfig(**snapshot.state["model"])).eval()
    load_weights(ours, snapshot.tensors["model"])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, ours(ids), rtol=1e-5, atol=1e-5)

    assert main(["export", str(hf), "--from", "hf", "--out", "runs/back"]) == 0  # with zero biases
    again, _ = resolve(Path("runs/back"))
    back = CheckpointStore(again.parent).load(again).tensors["model"]
    zeros = {n: torch.zeros_like(t) for n, t in back.items() if n.endswith(".bias")}
    assert same_bits(back, {**snapshot.tensors["model"], **zeros})
    assert main(["sample", "runs/back", "--prompt", "To be", "--tokens", "3"]) == 0
    hub = {name.removeprefix("transformer."): t for name, t in load_file(hf / FILE).items()}
    hub |= {f"h.{block}.attn.bias": torch.ones(1, 1, 12, 12) for block in range(2)}  # causal masks
    save_file(hub, hf / FILE)
    assert same_bits(read_hf(hf).weights, back)
    (hf / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["export", str(hf), "--from", "hf"]) == 2
    assert "activation_function must be 'gelu'; got 'gelu_new'" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["train", "--out", "runs/begun", *flags[:4]]) == 1  # weights alone
    assert "holds a model from elsewhere" in capsys.readouterr().err


def test_a_head_of_its_own_is_kept(tmp_path: Path) -> None:
    save(tmp_path / "ckpt.pt")
    found = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    found["model"]["lm_head.weight"] = found["model"]["lm_head.weight"] + 1
    torch.save(found, tmp_path / "ckpt.pt")
    assert main(["export", str(tmp_path / "ckpt.pt"), "--from", "nanogpt"]) == 0
    model = ours_of(tmp_path / "ckpt-run")
    assert model.head is not None
    assert torch.equal(model.head.weight, model.embed.weight + 1)


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda found: found["model"].pop(f"transformer.{name}")


def put(field: str, value: Any) -> Callable[[dict[str, Any]], object]:
    part, _, name = field.partition("/")
    return lambda found: found[part].update({name: value}) if name else found.update({part: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("wpe.weight"), "1 missing from the checkpoint: transformer.wpe.weight"),
        (put("model/extra.weight", torch.ones(1)), "unknown to the model: transformer.extra.weig"),
        (
            put("model_args/block_size", 8),
            "transformer.wpe.weight (got (12, 16) float32, expected (8, 16) float32)",
        ),
        (put("model_args/n_head", "2"), "n_head: got '2', expected a positive integer"),
        (lambda found: found["model_args"].pop("n_embd"), "'n_embd'"),
        (lambda found: found.clear(), "'model'"),
    ],
)
def test_what_is_not_nanogpts_is_refused_in_a_line(
    change: Callable[[dict[str, Any]], object],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "ckpt.pt"
    save(path)
    found = torch.load(path, weights_only=True)
    change(found)
    torch.save(found, path)
    assert main(["export", str(path), "--from", "nanogpt"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"gradsync: error: {path} is no checkpoint of nanoGPT: ")
    assert said in error
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == ["ckpt.pt"]


def test_nothing_strange_is_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = tmp_path / "ckpt.pt", tmp_path / "made"

    def refused(path: Path) -> None:
        assert main(["export", str(path), "--from", "nanogpt"]) == 2
        error = capsys.readouterr().err
        assert "not readable as a checkpoint of tensors and plain values" in error
        assert error.count("\n") == 1

    torch.save({"model": {}, "model_args": Stranger(made)}, path)
    refused(path)
    path.write_bytes(pickle.dumps(Stranger(made)))
    refused(path)
    refused(tmp_path / "missing.pt")
    refused(tmp_path)

    path.unlink()
    save(path)
    data = letters(tmp_path / "letters")
    out = ["--out", str(tmp_path / "run"), "--data", str(data)]
    assert main(["export", str(path), "--from", "nanogpt", *out]) == 0
    for strange in (Stranger(made), {}):
        (data / "meta.pkl").write_bytes(pickle.dumps(strange))
        assert main(["sample", str(tmp_path / "run")]) == 2
        assert "meta.pkl: is no list of characters" in capsys.readouterr().err
    (data / "meta.pkl").unlink()
    assert main(["sample", str(tmp_path / "run")]) == 2
    assert "so its tokenizer is unknown; give --data DIR" in capsys.readouterr().err
    assert not made.exists()
