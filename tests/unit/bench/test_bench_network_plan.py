"""`bench network` without a network: its floor, and the refusal where it may not make one."""

from __future__ import annotations

import os

import pytest

from gradsync.bench import network
from gradsync.bench.network import NetworkOptions, NetworkPoint, floor_of, plan_of
from gradsync.bench.report import Spread
from gradsync.errors import RunError
from gradsync.models.config import PRESETS
from gradsync.world import World


def point(rate_mbit: int, contestant: str, step_ms: float) -> NetworkPoint:
    step, ratio = (Spread(value, value, value, 1) for value in (step_ms, step_ms / 100))
    names = {"rate_mbit": rate_mbit, "contestant": contestant}
    return NetworkPoint(**names, step_ms=step, ratio=ratio, sent_mb=1.0)


@pytest.mark.parametrize("hosts", [2, 4])
def test_the_floor_is_what_the_cable_or_the_processor_takes(hosts: int) -> None:
    plan = plan_of(NetworkOptions(model_size="tiny", hosts=hosts), World())
    bits = 32 * PRESETS["tiny"].num_params() * 2 * (hosts - 1) / hosts
    found = [point(rate, name, 100.0) for rate in (1, 10**6) for name in ("naive", "none")]
    assert floor_of(plan, found, 1) == pytest.approx(bits / 1e6 / 0.1)
    assert floor_of(plan, found, 10**6) == 1.0


def test_who_may_not_make_namespaces_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    options = NetworkOptions(model_size="tiny")
    with pytest.raises(RunError, match=r"takes root, Linux and iproute2 \(ip, tc\)"):
        network._collect(options, plan_of(options, World()), World(), lambda *_: {})
