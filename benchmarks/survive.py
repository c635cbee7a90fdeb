"""Training that survives deaths: kills of running processes, and what copies of every step cost.

    python -m benchmarks.survive kills --count 100 --every 10 --stages 1 2 3
    torchrun --nproc-per-node 2 -m benchmarks.survive cost --model transformer-46m

`kills`: `zero-strategy run` trains a small model in several processes; one gets SIGKILL now and then (`--both`:
two at once; `--stop`: SIGSTOP for good). A stall is the time from a kill to the end of the next step, less a step's.
Goodput is what the steps of the run would take undisturbed, over what it took. The digest of weights and states is
compared with that of one process that nothing disturbs. `cost`: steps with a copy each, beside steps without.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpt import build, loss_fn
from benchmarks.slots import digest_of
from zero_strategy import ZeroEngine
from zero_strategy.comm.local_ranks import run_local_ranks
from zero_strategy.survive import Run, survive
from zero_strategy.survive.copies import MemoryCopies
from zero_strategy.survive.membership import Member, World
from zero_strategy.watchdog.peers import own_card

SLOTS = 12


def batch_of(step: int, slot: int) -> Tensor:
    """Tokens of a slot."""
    return torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(step * SLOTS + slot))


def steps_of(run: Run | None, config: dict[str, Any], steps: int, log: Path | None) -> str:
    """Train, and return the digest of weights and states.

    Args:
        run: With a copy of each step; None: without.
        config: Settings of the engine.
        steps: To take in all.
        log: A file for the time of each step's end.
    """
    torch.set_num_threads(1)
    model = build("transformer-tiny", 64)
    engine = ZeroEngine(model, {**config, "reproducible": SLOTS, "survive": run is not None})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine.attach(optimizer)
    state = {"step": 0} if run is None else run.restore(engine, {"step": 0})
    for step in range(state["step"], steps):
        for _ in range(engine.slots.count):
            with engine.micro_batch() as slot:
                batch = batch_of(step, slot)
                loss_fn(model(batch[:, :-1]), batch[:, 1:]).backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.commit(engine, {"step": step + 1})
            assert log is not None
            line = {"time": time.time(), "step": step + 1, "rank": run.rank, "ranks": run.world_size}
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return digest_of(engine, optimizer)


def worker(folder: str, config: str, steps: str) -> None:
    """One process of `zero-strategy run`."""
    log = Path(folder) / f"{os.getpid()}.jsonl"
    digest = survive(lambda run: steps_of(run, json.loads(config), int(steps), log))
    (Path(folder) / f"{os.getpid()}.digest").write_text(digest)


def undisturbed(config: dict[str, Any], steps: int) -> str:
    """The digest of a run that nothing disturbs."""
    return steps_of(None, config, steps, None)


def events(folder: Path) -> list[dict[str, Any]]:
    """Ends of steps of all processes, in the order of time."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines() if line.endswith("}")]
    return sorted((json.loads(line) for line in lines), key=lambda event: float(event["time"]))


def children(pid: int) -> list[int]:
    """Processes that train: those of the agent's that are not the lighthouse."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(one) for one in found if b"lighthouse" not in Path(f"/proc/{one}/cmdline").read_bytes()]
    except OSError:
        return []


def kills(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Figures of a run at each stage and in each tier."""
    # One for all: with slots stages and tiers have the same bits.
    expected = run_local_ranks("benchmarks.survive:undisturbed", ({"stage": 0}, options.steps), 1)[0]
    for tier, stage in product(options.tiers, options.stages):
        config: dict[str, Any] = {"stage": stage}
        with tempfile.TemporaryDirectory() as name:
            if tier == "nvme":
                config["offload"] = {"optimizer": "nvme", "nvme_path": [f"{name}/drive"], "probe_seconds": 0.0}
            elif tier == "cpu":
                config["offload"] = {"optimizer": "cpu"}
            yield {"stage": stage, "tier": tier, **_killed(options, config, Path(name), expected)}


def _killed(
    options: argparse.Namespace, config: dict[str, Any], folder: Path, expected: str
) -> dict[str, Any]:  # fmt: skip
    chosen, killed = random.Random(options.seed), list[float]()
    count = options.count // (len(options.stages) * len(options.tiers))
    command = [
        sys.executable, "-m", "zero_strategy.cli", "run", "--nproc-per-node", str(options.ranks), "-m",
        "benchmarks.survive", "worker", str(folder), json.dumps(config), str(options.steps),
    ]  # fmt: skip
    errors = (folder / "stderr").open("w")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors) as agent:
        begun = None
        while agent.poll() is None:
            time.sleep(0.2)
            if begun is None:
                there = events(folder)
                begun = time.monotonic() if there and there[-1]["ranks"] == options.ranks else None
            elif len(killed) < count and time.monotonic() - begun > options.every * (len(killed) + 1):
                time.sleep(chosen.random() * options.every / 4)
                running = children(agent.pid)
                if len(running) < options.ranks:
                    continue  # one is on its way already
                killed.append(time.time())
                for pid in chosen.sample(running, 2 if options.both else 1):
                    os.kill(pid, signal.SIGSTOP if options.stop else signal.SIGKILL)
    found = events(folder)
    digests = {file.read_text() for file in folder.glob("*.digest")}
    return {
        "exit": agent.returncode, "kills": len(killed), "steps": options.steps,
        "same bits": digests == {expected}, **_figures(found, killed, options),
        "left in memory": [path.name for path in Path("/dev/shm").glob("zero_strategy.*")],
    }  # fmt: skip


def _figures(found: list[dict[str, Any]], killed: list[float], options: argparse.Namespace) -> dict[str, Any]:
    first = [event for event in found if event["rank"] == 0]
    times = [float(event["time"]) for event in first]
    full = [b - a for a, b, event in zip(times, times[1:], first[1:]) if event["ranks"] == options.ranks]
    step = statistics.median(full)
    stalls = []
    for kill in killed:
        after = [at for at in times if at > kill]
        # The first end of a step may be of one that was over but for the message.
        gaps = [b - a for a, b in zip([kill, *after[:2]], after[:3])]
        stalls.append(max(gaps, default=0.0) - step)
    stalls.sort()
    return {
        "step seconds": step, "stalls": [round(each, 2) for each in stalls],
        "stall median": statistics.median(stalls) if stalls else None,
        "stall 99 %": stalls[min(len(stalls) - 1, round(0.99 * len(stalls)))] if stalls else None,
        "stall most": stalls[-1] if stalls else None,
        "steps taken twice": len(times) - len({event["step"] for event in first}),
        "goodput": options.steps * step / (times[-1] - times[0] + step),
    }  # fmt: skip


def cost(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step with and without its copy, in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(options.model, 128)
    engine = ZeroEngine(model, {"stage": options.stages[0], "reproducible": options.slots})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine.attach(optimizer)
    batch = torch.randint(0, 256, (options.rows, 129), generator=torch.Generator().manual_seed(rank))
    world = World(1, rank, [Member(f"{n:06d}:x", own_card(), "127.0.0.1", 1, "", 1) for n in range(ranks)])
    copies = MemoryCopies(Path(f"/dev/shm/zero_strategy.cost{os.getppid()}"))
    steps, taken = list[float](), list[float]()
    for turn in range(options.rounds + 2):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(options.slots // ranks):
            loss_fn(model(batch[:, :-1]), batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        stepped = time.perf_counter()
        copies.take(engine, world, {"step": turn})
        dist.barrier()
        if turn > 1:  # the first two make files and pages
            steps.append(stepped - begun)
            taken.append(time.perf_counter() - stepped)
    size = sum(path.stat().st_size for path in copies.folder.rglob("*") if path.is_file())
    engine.close()
    if rank == 0:
        copies.remove()
    return {
        "model": options.model, "ranks": ranks, "stage": options.stages[0], "step seconds": statistics.median(steps),
        "copy seconds": statistics.median(taken), "share": statistics.median(taken) / statistics.median(steps),
        "bytes of two copies, all ranks": size,
    }  # fmt: skip


def main() -> None:
    """Print the figures as JSON."""
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survive", description=__doc__)
    parser.add_argument("what", choices=("kills", "cost"))
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tiers", nargs="*", choices=("none", "cpu", "nvme"), default=["none"])
    parser.add_argument("--count", type=int, default=100, help="of kills, over all stages and tiers")
    parser.add_argument("--every", type=float, default=20.0, help="seconds from one kill to the next")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--both", action="store_true", help="kill two at once")
    parser.add_argument("--stop", action="store_true", help="SIGSTOP in place of SIGKILL")
    parser.add_argument("--model", default="transformer-46m", help="of cost")
    parser.add_argument("--rows", type=int, default=2, help="of cost: sequences of 128 tokens in a micro-batch")
    parser.add_argument("--slots", type=int, default=4, help="of cost")
    parser.add_argument("--rounds", type=int, default=8, help="of cost")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.what == "cost":
        found = cost(options)
        if dist.get_rank() == 0:
            print(json.dumps(found, indent=2))
    else:
        for figures in kills(options):
            print(json.dumps(figures, indent=2), flush=True)


if __name__ == "__main__":
    main()
