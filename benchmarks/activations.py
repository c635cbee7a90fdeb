"""Costs and savings of recomputation: the time of a step in each mode against mode none, and the bytes that are kept.

    python -m benchmarks.activations --model transformer-small --length 256 --batch 4 --out activations.json

One process on the CPU. Two models of the same weights take turns (A B B A), so the ratio is of one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpt import SIZES, build, loss_fn
from benchmarks.ratios import TURNS, Ratio, bootstrap, round_ratio
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.runtime.terminal import size, table

MODES: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "selective": {"mode": "selective"},
    "every_n 2": {"mode": "every_n", "every_n": 2},
    "budget 0.5": {"mode": "budget", "budget": 0.5},
}


@dataclass(frozen=True)
class Result:
    """A mode against none."""

    mode: str
    time: Ratio
    seconds: float
    """Of a step in this mode, median."""
    kept: int
    """Bytes that a forward leaves for backward, logits and loss included."""


class Alive(TorchDispatchMode):
    """The memory of tensors that ops have made and that is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        return made

    def nbytes(self) -> int:
        return sum(nbytes for storage, nbytes in self._made.items() if not storage.expired())


class Contender:
    """One model in one mode."""

    def __init__(self, options: argparse.Namespace, mode: dict[str, Any]) -> None:
        self.clock = time.process_time if options.clock == "cpu" else time.perf_counter
        self.model = build(options.model, options.length)
        config = load_config(stage=options.stage, activation_checkpointing=mode)
        self.engine = ZeroEngine(self.model, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.engine.attach(self.optimizer)
        vocabulary: int = SIZES[options.model].vocabulary
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, vocabulary, (options.batch, options.length + 1), generator=generator)

    def loss(self) -> Tensor:
        return loss_fn(self.model(self.tokens[:, :-1]), self.tokens[:, 1:])

    def step(self) -> float:
        """Seconds of one step."""
        start = self.clock()
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.clock() - start

    def kept(self) -> int:
        with Alive() as alive:
            loss = self.loss()
            found: int = alive.nbytes()
        del loss
        return found


def compare(options: argparse.Namespace, name: str) -> Result:
    """One mode against none."""
    contenders = {"A": Contender(options, MODES[name]), "B": Contender(options, {"mode": "none"})}
    for contender in contenders.values():  # the first step measures in mode budget, and makes optimizer state
        for _ in range(2):
            contender.step()
    ratios, seconds = [], []
    for _ in range(options.rounds):
        blocks = [[contenders[turn].step() for _ in range(options.steps)] for turn in TURNS]
        ratios.append(round_ratio(blocks))
        seconds += [taken for block, turn in zip(blocks, TURNS, strict=True) if turn == "A" for taken in block]
    return Result(name, bootstrap(ratios), statistics.median(seconds), contenders["A"].kept())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What recomputation costs and saves.")
    parser.add_argument("--model", choices=SIZES, default="transformer-small")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in a turn")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: where a machine is shared")
    parser.add_argument("--out", type=Path, help="JSON of all numbers")
    options = parser.parse_args(arguments)
    results = [compare(options, name) for name in options.modes]
    none = Contender(options, {"mode": "none"}).kept()
    rows = [("none", "1", "", "", size(none), "1")]
    for found in results:
        low, high = f"{found.time.low:.3f}", f"{found.time.high:.3f}"
        rows.append((found.mode, f"{found.time.median:.3f}", low, high, size(found.kept), f"{found.kept / none:.3f}"))
    print(table(rows, ("mode", "time / none", "from", "to", "kept", "kept / none"), right=(1, 2, 3, 4, 5)))
    if options.out:
        numbers = {"none_kept": none, "options": vars(options) | {"out": None}, "results": [asdict(r) for r in results]}
        options.out.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
