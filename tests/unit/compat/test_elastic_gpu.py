"""`ElasticGPUConfig`: the published table, from memory instead of names."""

from __future__ import annotations

import pytest
import torch

from gradsync.commands.plan.description import Device, Hardware, Host, Link
from gradsync.compat import log_gpu_memory
from gradsync.compat.elastic_gpu import ElasticGPUConfig
from gradsync.errors import ConfigError

GB = 10**9
LINK = Link(name="nvlink4", alpha_s=1e-6, bytes_per_s=1e11)


def gpus(count: int, gb: int, *, name: str = "NVIDIA A100") -> Hardware:
    device = Device(
        kind="cuda", name=name, memory_bytes=gb * GB, peak_flops=3e14, compute_capability=(8, 0)
    )
    host = Host(devices=(device,) * count, link=LINK, cores=8, memory_bytes=10**11)
    return Hardware(hosts=(host,))


@pytest.mark.parametrize(
    ("count", "gb", "strategy", "groups"),
    [
        (1, 80, "single", ((0,),)),
        (2, 80, "ddp", ((0,), (1,))),
        (3, 80, "ddp", ((0,), (1,), (2,))),
        (4, 80, "ddp", ((0,), (1,), (2,), (3,))),
        (2, 40, "model_split", ((0, 1),)),
        (3, 40, "hybrid", ((0, 1, 2),)),
        (4, 40, "hybrid_ddp", ((0, 1), (2, 3))),
    ],
)
def test_the_table(count: int, gb: int, strategy: str, groups: tuple[tuple[int, ...], ...]) -> None:
    """A replica of 55 GB. The name is the same: 40 and 80 GB are told apart by memory."""
    config = ElasticGPUConfig(64, 55.0, hardware=gpus(count, gb))
    assert config.gpu_count == count
    assert config.strategy == config.config["strategy"] == strategy
    assert config.groups == groups


def product(config: ElasticGPUConfig) -> int:
    """What a loop trains on in a step that does as it is told."""
    batch = config.config
    return batch["batch_size"] * batch["grad_accum_steps"] * config.replicas


def test_the_batch_is_the_one_asked_for_or_the_nearest() -> None:
    for count in range(1, 9):
        config = ElasticGPUConfig(64, 10.0, sample_gb=5.0, hardware=gpus(count, 80))
        assert config.config["effective_batch_size"] == product(config)
        assert config.config["batch_size"] <= 10  # 50 GB
        assert abs(product(config) - 64) <= (count // 2 if 64 % count else 0)


@pytest.mark.parametrize(("ranks", "batch"), [(1, (64, 1)), (2, (32, 1)), (3, (21, 1))])
def test_ranks_of_this_run_share_the_batch(
    ranks: int, batch: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process takes all of it, however many cores there are."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(ranks))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    config = ElasticGPUConfig(64)
    assert (config.config["batch_size"], config.config["grad_accum_steps"]) == batch
    assert config.config["effective_batch_size"] == product(config) == ranks * batch[0]


@pytest.mark.parametrize(
    ("samples", "replicas", "sample_gb", "batch_size", "steps"),
    [
        (256, 3, None, 85, 1),  # 255
        (64, 1, 10.0, 4, 16),  # activations limit a forward
        (64, 3, None, 21, 1),  # 63
        (64, 3, 12.0, 3, 7),  # 63 again, with room for 4 samples
        (96, 3, 7.0, 4, 8),
        (7, 2, None, 3, 1),  # as near as 8, and no rank gets more than its share
    ],
)
def test_replicas_take_equal_shares(
    samples: int, replicas: int, sample_gb: float | None, batch_size: int, steps: int
) -> None:
    config = ElasticGPUConfig(samples, 10.0, sample_gb=sample_gb, hardware=gpus(replicas, 80))
    assert (config.config["batch_size"], config.config["grad_accum_steps"]) == (batch_size, steps)


def test_hardware_by_name() -> None:
    config = ElasticGPUConfig(256, 55.0, hardware="a100-40x3")
    assert (config.strategy, config.gpu_count) == ("hybrid", 3)
    with pytest.raises(ConfigError, match="strategy 'hybrid' places frozen parts, and none were"):
        config.place(torch.nn.Linear(1, 1))


def test_bad_numbers() -> None:
    with pytest.raises(ConfigError, match="2 replicas cannot share 1 samples"):
        ElasticGPUConfig(1, 10.0, hardware=gpus(2, 80))
    with pytest.raises(ConfigError, match=r"2 devices with 60.0 GB to plan with: 10.0 GB are"):
        ElasticGPUConfig(64, 70.0, hardware=gpus(2, 40))
    with pytest.raises(ConfigError, match="no room for one sample of 20"):
        ElasticGPUConfig(64, 50.0, sample_gb=20.0, hardware=gpus(1, 80))


def test_every_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert ElasticGPUConfig(64, 55.0, hardware=gpus(4, 40)).config["device"] == "cuda:2"
    assert ElasticGPUConfig(64, 55.0, hardware=gpus(2, 80)).config["device"] == "cuda:1"


def test_the_summary() -> None:
    text = str(ElasticGPUConfig(64, 10.0, hardware=gpus(2, 80)))
    assert text.splitlines()[:3] == [
        "2 x NVIDIA A100: 60.0 GB each may be planned with",
        "strategy ddp: replicas on devices 0, 1",
        "batch 64 = 2 replicas x 32 samples x 1 forward",
    ]


def test_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Any hardware; here most likely a CPU."""
    config = ElasticGPUConfig(base_batch_size=64)
    assert config.strategy in ("single", "ddp")
    assert str(config).startswith(f"{len(config.devices)} x ")
    assert config.config["device"] == ("cuda:0" if config.gpu_count else "cpu")
    log_gpu_memory("now")
    assert capsys.readouterr().out.startswith("now: ")
