"""The settings of a run, and those of each recipe."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gradsync.commands.models.config import PRESETS, GPTConfig
from gradsync.commands.train import config as config_module
from gradsync.commands.train.config import (
    CheckpointConfig,
    EvalConfig,
    OptimConfig,
    SyncConfig,
    TrainConfig,
    recipe,
)
from gradsync.commands.train.config_io import parse_config, to_flags, write_config
from gradsync.errors import ConfigError

PARTS = (TrainConfig, OptimConfig, EvalConfig, CheckpointConfig, SyncConfig)


@pytest.mark.parametrize(
    ("part", "name", "refused", "allowed", "rule"),
    [
        (OptimConfig, "lr", (0.0, -1e-3, math.nan), (1e-9,), "a positive number"),
        (OptimConfig, "min_lr_ratio", (-0.1, 1.1), (0.0, 1.0), "in 0..1"),
        (OptimConfig, "warmup_steps", (-1,), (0,), "at least 0"),
        (OptimConfig, "clip_norm", (0.0, -1.0), (None,), "positive, or None for no clipping"),
        (EvalConfig, "max_tokens", (0,), (1, None), "at least 1"),
        (EvalConfig, "every", (-1,), (0,), "at least 0"),
        (CheckpointConfig, "keep_last", (0,), (1,), "at least 1"),
        (TrainConfig, "steps", (0,), (1,), "at least 1"),
        (TrainConfig, "tokens_per_update", (0,), (1,), "at least 1"),
        (TrainConfig, "threads", (0,), (1, None), "at least 1"),
        (TrainConfig, "seq_len", (0,), (1, 256, None), "at least 1"),
        (TrainConfig, "num_workers", (-1,), (0,), "at least 0"),
        (TrainConfig, "timeout_s", (0.0,), (0.1,), "positive, at most 1000000000"),
        (TrainConfig, "silence_s", (0.5,), (1.0,), "at least 1"),
    ],
)
def test_refused_by_name(
    part: type, name: str, refused: tuple[Any, ...], allowed: tuple[Any, ...], rule: str
) -> None:
    for value in refused:
        with pytest.raises(ConfigError, match=f"{name} must be {rule}; got {value}"):
            part(**{name: value})
    for value in allowed:
        assert getattr(part(**{name: value}), name) == value


def test_a_sequence_longer_than_the_model_takes() -> None:
    with pytest.raises(ConfigError, match=r"seq_len 257 is longer than model.block_size 256"):
        TrainConfig(seq_len=257)
    model = GPTConfig(block_size=128)
    assert TrainConfig(model=model).sequence_length == 128
    assert TrainConfig(model=model, seq_len=64).sequence_length == 64


def test_what_does_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"drop sync_options.bucket_mb, or name the strategy"):
        TrainConfig(sync="auto", sync_options=SyncConfig(bucket_mb=1.0))
    with pytest.raises(ConfigError, match=r"compile=ddp .* sync=naive; use compile=model"):
        TrainConfig(compile="ddp", sync="naive")
    assert TrainConfig(compile="model", sync="naive").compile == "model"
    assert TrainConfig(compile="ddp", sync="ddp").compile == "ddp"


def test_every_field_is_explained() -> None:
    """`--help` shows the comment beside each field, or the docstring below it."""
    source = inspect.getsource(config_module)
    lines, tree = source.splitlines(), ast.parse(source)
    for class_ in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, after in zip(class_.body, [*class_.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and "  # " not in lines[field.lineno - 1]:
                assert isinstance(after, ast.Expr), ast.unparse(field)
                assert isinstance(after.value, ast.Constant), ast.unparse(field)
                assert isinstance(after.value.value, str), ast.unparse(field)


# -- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_recipe(name: str) -> None:
    config = recipe(name)
    assert config.preset == name
    assert config.model == PRESETS[name]
    assert config.optim.warmup_steps < config.steps
    assert config.optim.schedule == "cosine"
    for world_size in (1, 2, 3, 4):
        plan = config.batch_plan(world_size)
        assert plan.tokens_per_update == config.tokens_per_update  # exact, nothing rounded


def test_recipes_together() -> None:
    by_width = sorted((recipe(name) for name in PRESETS), key=lambda c: c.model.n_embd)
    rates = [config.optim.lr for config in by_width]
    assert rates == sorted(rates, reverse=True)  # wider models learn no faster
    with pytest.raises(ConfigError, match=r"unknown model preset 'midium'.*there are: tiny"):
        recipe("midium")


# -- files ----------------------------------------------------------------------------------------


CHANGED = replace(
    recipe("mini"),
    steps=7,
    seed=2,
    sync="naive",
    out="somewhere/else",
    seq_len=32,
    dtype="fp32",
    tf32=False,
    threads=2,
    resume="none",
    allow_numeric_change=True,
    activation_checkpointing=True,
    check_replicas_every=5,
    timeout_s=12.5,
    model=GPTConfig(n_layer=2, n_kv_head=2, dropout=0.25, tie_head=False),
    optim=OptimConfig(lr=3e-4, schedule="wsd", clip_norm=None, fused=False),
    eval=EvalConfig(every=0, max_tokens=None),
    checkpoint=CheckpointConfig(every=3, keep_last=5),
    sync_options=SyncConfig(bucket_mb=0.5, overlap=False, reduction="ring", inner_steps=7),
)


@pytest.mark.parametrize("config", [*map(recipe, PRESETS), CHANGED], ids=lambda c: c.preset)
def test_a_written_configuration_reads_back(config: TrainConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_config(config, path)
    assert parse_config([str(path)]) == config


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "mini"\nsteps = 5\n[optim]\nlr = 3e-4\n')
    config = parse_config([str(path), "--steps", "6"])
    expected = replace(recipe("mini"), steps=6)
    assert asdict(config) == asdict(replace(expected, optim=replace(expected.optim, lr=3e-4)))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "- 1\n- 2\n", "must hold keys and values; got list"),
        ("a.yaml", "", "must hold keys and values; got NoneType"),
        ("a.yml", "a: [1\n", "does not parse"),
        ("a.toml", "a = \n", "does not parse"),
    ],
)
def test_a_file_that_is_none(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse_config([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("help: 1", ":1: unknown key 'help'"),
        ("ddp_enabled: true", ":1: unknown key 'ddp_enabled': leave it out; --nproc-per-node"),
        ("ddp-backend: nccl", ":1: unknown key 'ddp-backend': backend"),
        ("steps: 1\nstepz: 2", ":2: unknown key 'stepz'; perhaps you meant 'steps'"),
        ("optim:\n  lrr: 1", ":2: unknown key 'optim.lrr'; perhaps you meant 'optim.lr'"),
        ("optim:\n  lr: abc", ":2: optim.lr: got 'abc': Expected `float`"),
        ("optim:\n  lr: .nan", ": optim.lr must be a positive number; got nan"),
        ("optim: 5", ":1: unknown key 'optim'"),
        ("optim.lr: 1\noptim: {lr: 2}", ":2: optim.lr is given twice"),
        ("seed: 1\nsteps: 0", ": steps must be at least 1; got 0"),
        ("steps: true", ":1: steps: got True: Expected `int`"),
        ("steps: {a: 1}", ":1: unknown key 'steps.a'"),
        ("dtype: fp8", ":1: dtype: got 'fp8': Invalid enum value 'fp8'"),
        ("preset: midium", ": unknown model preset 'midium'"),
        ("sync_options: {wire: 1}", ":1: sync_options.wire: got 1: Expected `str | null`"),
    ],
)
def test_a_bad_value_is_refused_with_file_line_and_key(
    text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse_config([str(path)])
    assert f"{path}{words}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_is_not_taken_for_a_flag(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("out: --help\noptim:\nmodel: {dropout: 0}\nlog-every: '7'\n")
    config = parse_config([str(tmp_path / "a.yaml")])
    assert (config.out, config.log_every, config.model.dropout) == ("--help", 7, 0.0)


def test_options_of_the_strategy_are_words(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("sync_options: {wire: bf16, bucket_mb: 5}\n")
    flags = [
        "--sync-options",
        "bucket_mb=7",
        "overlap=false",
        "--steps=3",
        "--sync-options=shard=none",
    ]
    config = parse_config([str(tmp_path / "a.yaml"), *flags])
    expected = {"wire": "bf16", "bucket_mb": 7, "overlap": False, "shard": "none"}
    assert (config.sync_options.given(), config.steps) == (expected, 3)
    with pytest.raises(ConfigError, match=r"unknown option of a strategy 'bukcet_mb'.*bucket_mb"):
        parse_config(["--sync-options", "bukcet_mb=5"])
    with pytest.raises(ConfigError, match="'bucket_mb' is not key=value"):
        parse_config(["--sync-options", "bucket_mb"])


def test_a_switch_that_is_on_already_may_be_given_again(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("allow_numeric_change: true\ntf32: false\n")
    for words in ([], ["--allow-numeric-change", "--no-tf32"]):
        config = parse_config([str(tmp_path / "a.yaml"), *words])
        assert (config.allow_numeric_change, config.tf32) == (True, False)
    assert parse_config([str(tmp_path / "a.yaml"), "--tf32"]).tf32


def test_values_become_flags() -> None:
    values = {"steps": 5, "tf32": False, "optim": {"clip_norm": 0.5, "fused": False}, "out": ""}
    values |= {"sync_options": {"wire": None, "overlap": False, "bucket_mb": 5.0}}
    assert to_flags(values) == [
        *("--steps", "5"),
        "--no-tf32",
        *("--optim.clip-norm", "0.5"),
        "--optim.no-fused",
        *("--out", ""),
        *("--sync-options", "overlap=False", "bucket_mb=5.0"),
    ]
