"""Steps of two hosts on a slow link, with parameters gathered as values and as changes.

    python -m benchmarks.slow_link [--rate 100mbit] [--stage 2] [--gradients bfloat16] [--out slow_link.json]

Makes two network namespaces, for which it needs the rights of root. A GPT of 46M parameters in bf16 trains at 1e-5 in
two copies, one of each kind, with the same data: `--warm` steps at full speed, then the link gets the rate, and steps
of the copies take turns as A B B A. The median of the ratios of neighbours; bytes of parameters that a rank sends per
step; and whether all weights of both copies are equal in all bits. Linear layers compute in float32, which is faster
than bf16 on most processors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpt import build, loss_fn
from benchmarks.ratios import slowest
from tests.cluster.hosts import INTERFACE, two_hosts, why_not
from zero_strategy import ZeroEngine

KINDS = ("values", "delta")


class Float32Linear(nn.Linear):
    """Weights in bf16, products in float32."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)


class Copy:
    """One of the trainings."""

    def __init__(self, parameters: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model: nn.Module = build("transformer-46m", 128)
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Float32Linear
        narrow = options.gradients == "bfloat16"
        precision = {"gradient_dtype": "parameter", "reduce_dtype": "gradient"} if narrow else {}
        settings = {"stage": options.stage, "communication": {"parameters": parameters}, "precision": precision}
        self.engine = ZeroEngine(model, settings, compute_dtype=torch.bfloat16)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.engine.attach(self.optimizer)
        self.sent = 0

    def step(self, rows: Tensor) -> None:
        loss_fn(self.model(rows[:, :-1]), rows[:, 1:]).backward()
        counters = self.engine.counters
        before = counters.bytes["all_gather"] + counters.bytes["all_to_all"]
        self.optimizer.step()
        self.sent = counters.bytes["all_gather"] + counters.bytes["all_to_all"] - before
        self.optimizer.zero_grad()


def work(options: argparse.Namespace) -> None:
    """A rank."""
    dist.init_process_group("gloo")
    copies = [Copy(kind, options) for kind in KINDS]
    chance = torch.Generator().manual_seed(dist.get_rank())
    folder = Path(options.folder)

    def rows() -> Tensor:
        return torch.randint(16384, (1, options.tokens + 1), generator=chance)

    for _ in range(options.warm):
        batch = rows()
        for copy in copies:
            copy.step(batch)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "warm").touch()
    while not (folder / "slow").exists():
        time.sleep(0.05)
    ratios, seconds, shares = [], [], []
    for _ in range(options.rounds):
        first, second = rows(), rows()
        turns = ((0, first), (1, first), (1, second), (0, second))
        a, b, c, d = (slowest(partial(copies[which].step, batch)) for which, batch in turns)
        ratios.append((a + d) / (b + c))
        seconds.append([(a + d) / 2, (b + c) / 2])
        shares.append(copies[1].sent / copies[0].sent)
    equal = all(map(torch.equal, *(copy.model.parameters() for copy in copies)))
    if dist.get_rank() == 0:
        found = {
            "stage": options.stage,
            "gradients": options.gradients,
            "link": options.rate,
            "seconds of a step": {k: statistics.median(s[n] for s in seconds) for n, k in enumerate(KINDS)},
            "times faster": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
            "bytes of parameters, changes over values": statistics.median(shares),
            "all bits equal": equal,
        }
        (folder / "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit", help="of the link, in tc's words")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2))
    parser.add_argument("--gradients", default="bfloat16", choices=("bfloat16", "float32"), help="in which they travel")
    parser.add_argument("--tokens", type=int, default=64, help="per rank and step")
    parser.add_argument("--warm", type=int, default=60, help="steps before the link is slow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.folder:
        work(options)
        return
    if reason := why_not():
        sys.exit(f"two hosts cannot be made here: {reason}")
    words = sys.argv[1:] if arguments is None else list(arguments)
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        for rank, host in enumerate(hosts):
            env = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29511",
                "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            module = [sys.executable, "-m", "benchmarks.slow_link", *words, "--folder", folder]
            host.start(module, env, Path(folder) / f"rank-{rank}.log")
        for host in hosts:
            _wait(lambda: (Path(folder) / "warm").exists(), hosts, folder)
            shaped = ["tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", options.rate]
            shaped += ["burst", "256kb", "latency", "200ms"]
            subprocess.run(["ip", "netns", "exec", host.namespace, *shaped], check=True)
        (Path(folder) / "slow").touch()
        _wait(lambda: (Path(folder) / "found").exists(), hosts, folder)
        found: dict[str, Any] = json.loads((Path(folder) / "found").read_text())
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


def _wait(condition: Any, hosts: Any, folder: str) -> None:
    while not condition():
        time.sleep(0.1)
        for rank, host in enumerate(hosts):
            if host.processes[0].poll() not in (None, 0):
                sys.exit(f"rank {rank} ended:\n" + (Path(folder) / f"rank-{rank}.log").read_text()[-3000:])


if __name__ == "__main__":
    main()
