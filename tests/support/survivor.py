"""A rank that trains on after losses; its program kills ranks: `RANK:STEP:PLACE …`, by their first
numbers, with a + for each time that they were started again. It writes what it did to
`OUT/RANK.json`.

    survivor.py OUT STRATEGY[:own] [KILL …]        own: loss.backward(), optimizer.step()

Among the kills: `wait:STEP`, before that step rank 0 waits for a rank that was started again;
`until:SIZE`, before each step after the first one it waits for as many ranks; `sees:RANK`, before
the second one for the end of that rank's launcher; `saves`, after each step; `differs`, a rank that
was started again has another learning rate; `late`, sums come behind the host, as on a GPU, and
those that a lost rank leaves open are garbage; `uneven`, ranks have made unequally many groups.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import gradsync as gs
from gradsync.checkpoint.weights import weights_sha256
from gradsync.core.files import Filesystem
from gradsync.runtime.peers import Peers, process_state

STEPS, MICRO_BATCHES, EVALUATED = 6, 8, 12


def main(out: str, strategy: str, *kills: str) -> None:
    strategy, _, own = strategy.partition(":")
    me = os.environ.get("RANK", "0") + "+" * int(os.environ.get("GRADSYNC_REJOIN", "0"))
    once: list[str] = []
    now, queued, first = 0, False, int(os.environ.get("WORLD_SIZE", "1"))

    def plug(state: str) -> None:
        subprocess.run(["ip", "link", "set", "veth0", state], check=True)

    say_gone = Peers.server_obituary

    def plugging(peers: Peers, error: BaseException) -> str:
        plug("up")
        return say_gone(peers, error)

    def dies(place: str) -> None:
        if f"{me}:{now}:{place}" in kills or f"{me}:*:{place}" in kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{me}:{now}:{place}:stops-all" in kills:
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{me}:{now}:{place}:stops" in kills:
            os.kill(os.getpid(), signal.SIGSTOP)
        if f"{me}:{now}:{place}:asks" in kills:  # a stop, of all
            os.kill(os.getpid(), signal.SIGTERM)
        if f"{me}:{now}:{place}:cuts" in kills:  # its host off the network
            plug("down")
            if "plugs" in kills:  # in again when its ranks notice that the store is gone
                Peers.server_obituary = plugging  # type: ignore[method-assign]
        if f"{me}:{now}:{place}:asks-launcher-0" in kills:
            os.kill(int(Path(out, "launcher-0").read_text()), signal.SIGTERM)
            while not world.should_stop:
                time.sleep(0.01)
        if f"{me}:{now}:{place}:sends-away" in kills:
            while not recovery.one_waits():
                time.sleep(0.01)
            os.kill(int(Path(out, "launcher-1+").read_text()), signal.SIGTERM)
            while recovery.one_waits():
                time.sleep(0.01)
        if f"{me}:{now}:{place}:host" in kills:
            Path(out, "host-is-lost").touch()
            launcher = psutil.Process(os.getppid())
            launcher.suspend()
            others = [each for each in launcher.children() if each.pid != os.getpid()]
            for each in (*others, launcher, psutil.Process()):
                each.kill()
        if (cut := f"{me}:{now}:{place}:cut-off") in kills and cut not in once:
            once.append(cut)  # for a moment: all ranks live
            cast("Any", recovery)._group._cut()
        if f"{me}:{now}:{place}:drifts" in kills:
            model[0].weight.data[0, 0] += 1e-3
        if f"{me}:{now}:{place}:raises" in kills:
            raise ValueError("a bug of the program")

    Path(out, f"launcher-{me}").write_text(str(os.getppid()))
    silence_s = float(os.environ.get("TEST_SILENCE_S", "1.5"))
    with gs.init(
        seed=0, threads=1, on_loss="shrink", silence_s=silence_s, catch_stop=True
    ) as world:
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))
        sync = gs.replicate(model, world, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        recovery = world.recovery
        assert recovery is not None
        commit = recovery.commit

        def dying_commit(barrier: Callable[[], None], *, evaluates: bool = False) -> None:
            nonlocal queued
            queued = not evaluates
            dies("evaluated" if evaluates else "reduced")
            commit(barrier, evaluates=evaluates)
            dies("done" if evaluates else "committed")

        recovery.commit = dying_commit

        def arrive(_: torch.device) -> None:
            nonlocal queued
            if not queued:
                return
            queued = False
            dies("queued")
            if any(kill[2:] == f"{now}:queued" for kill in kills) and world.world_size == first:
                while not recovery.lost:
                    time.sleep(0.01)
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 1e3)
                if f"1:{now}:queued" in kills and world.is_main:
                    raise ValueError("rank 0 found garbage")

        if "late" in kills:
            object.__setattr__(world, "device_name", "cpu:0")
            torch.cuda.synchronize = arrive  # type: ignore[assignment]
            init = dist.init_process_group
            dist.init_process_group = lambda *_, **named: init(*_, **named | {"device_id": None})
        group = cast("Any", recovery)._group
        regroup = group.regroup

        def dying_regroup(number: int, presences: list[Any]) -> None:
            dies("remade")
            regroup(number, presences)

        group.regroup = dying_regroup
        make_group = group._make_group

        def dying_make_group(*given: Any) -> None:
            dies("grouped")
            if "uneven" in kills and world.is_main:  # as after a group that only others have made
                dist.distributed_c10d._world.group_count += 1
            make_group(*given)

        group._make_group = dying_make_group
        data = TensorDataset(torch.randn(STEPS * 16, 8), torch.randint(4, (STEPS * 16,)))
        loader = gs.loader(data, world, global_batch_size=16, micro_batch_size=2, num_epochs=1)
        done, losses, draws, seen = [], [], [], []
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        rename = Filesystem.rename

        def dying_rename(files: Filesystem, source: Path, target: Path) -> None:
            dies(target.name)
            rename(files, source, target)

        Filesystem.rename = dying_rename  # type: ignore[method-assign]
        check = sync.check_replicas

        def dying_check(optimizer: Any) -> None:
            dies("compares")
            check(optimizer)

        sync.check_replicas = dying_check  # type: ignore[method-assign]
        dies("built")
        steps, state = gs.load(Path(out, "checkpoints"), **parts)
        if state:
            scheduler.load_state_dict(state)
        dies("loaded")
        if "differs" in kills and "+" in me:
            optimizer.param_groups[0]["lr"] = 0.3
        for batch in loader:
            now = batch.number
            until = max(int(kill[6:]) for kill in ("until:0", *kills) if kill[:6] == "until:")
            size = first if f"wait:{now}" in kills else until if now else 0
            while world.is_main and world.world_size < size and not recovery.one_waits():
                time.sleep(0.01)
            for name in (kill[5:] for kill in kills if kill[:5] == "sees:" and now == 1):
                launcher = Path(out, f"launcher-{name}")
                while not launcher.exists() or process_state(int(launcher.read_text())) != "ended":
                    time.sleep(0.01)
            while "waiter:2" in kills and now == 1 and not recovery.one_waits():
                time.sleep(0.01)
            torch.rand(3)
            for attempt in sync.attempts():
                with attempt:  # an evaluation without messages of its own
                    dies("evaluates")
                    share = [*range(world.rank, EVALUATED, world.world_size)]
            for attempt in sync.attempts():
                with attempt:  # else a rank that dies next may leave others in it
                    everyone = gs.gather(share)
            seen.append(sorted(number for each in everyone for number in each))
            for attempt in sync.attempts(batch):
                with attempt:
                    dies("data")
                    mine, drawn = [], torch.rand(()).item()
                    for micro_batch in batch:
                        with nullcontext() if micro_batch.is_last or not own else sync.no_sync():
                            loss = cross_entropy(model(micro_batch.inputs), micro_batch.targets)
                            dies("forward")
                            if own:  # ranks have equally many, or the mean is not that of one rank
                                (loss / len(batch)).backward()
                            else:
                                sync.backward(loss, micro_batch)
                        mine.append(micro_batch.index)
                    dies("backward")
                    waits = False
                    if own:
                        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()
                    else:
                        waits = sync.step(optimizer, clip_norm=1.0).rank_waits
                    scheduler.step()
            if world.should_stop:
                raise SystemExit(75)
            steps += 1
            dies("stepped")
            if waits or "saves" in kills:
                extra = scheduler.state_dict()
                gs.save(Path(out, "checkpoints"), step=steps, extra=extra, **parts)
                dies("saved")
            done.append([batch.number, mine])
            draws.append(drawn)
            losses.append(0.0 if own else sync.mean_loss)
        averages = {str(i): state["exp_avg"] for i, state in enumerate(optimizer.state.values())}
        told = {
            "done": done,
            "losses": losses,
            "draws": draws,
            "seen": seen,
            "lr": scheduler.get_last_lr(),
            "world_size": world.world_size,
            "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
            "sha256": weights_sha256({**dict(model.named_parameters()), **averages}.items()),
        }
        Path(out, f"{me}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
