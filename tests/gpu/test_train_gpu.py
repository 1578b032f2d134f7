"""A whole run on CUDA: mixed precision, fp16 scaling, resume. Needs one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.run import TrainOutcome, train
from gradsync.runtime.session import Session
from gradsync.runtime.session_options import SessionOptions
from support.small_run import losses, make_data, small_config

pytestmark = pytest.mark.gpu


def run(config: TrainConfig) -> TrainOutcome:
    session = Session(SessionOptions(device="cuda", threads=1), env={})
    with session as world:
        assert str(world.device) == "cuda:0"
        return train(config, world, threads=session.threads)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_trains_and_resumes(dtype: str, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    config = small_config(tmp_path / "run", data, device="cuda", dtype=dtype, steps=40)
    assert run(replace(config, steps=20)).exit_code == 0
    outcome = run(config)
    assert outcome.exit_code == 0
    assert outcome.summary["steps"] == 40
    history = losses(tmp_path / "run")
    assert sorted(history) == list(range(1, 41))
    assert outcome.summary["val_loss"] < 4.0


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", ["none", "model"])
def test_the_same_run_gives_the_same_bits(compiled: str, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    shape = GPTConfig(n_layer=2, n_head=4, n_embd=256, vocab_size=64, block_size=128)
    hashes = {
        run(
            small_config(
                tmp_path / name,
                data,
                device="cuda",
                dtype="bf16",
                model=shape,
                compile=compiled,
                micro_batch_size=8,
                tokens_per_update=2048,
                steps=10,
            )
        ).summary["weights_sha256"]
        for name in ("first", "second")
    }
    assert len(hashes) == 1


def test_cuda_follows_the_cpu_in_fp32(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    # Dropout masks come from the device's own generator, so they differ: none here.
    model = replace(small_config(tmp_path, data).model, dropout=0.0)
    cuda = small_config(tmp_path / "cuda", data, device="cuda", model=model, tf32=False)
    run(cuda)
    session = Session(SessionOptions(device="cpu", threads=1), env={})
    with session as world:
        train(replace(cuda, device="cpu", out=str(tmp_path / "cpu")), world, threads=1)
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-4)
