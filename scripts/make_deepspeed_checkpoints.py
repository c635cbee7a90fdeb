"""Writes checkpoints with the real DeepSpeed, and beside each one what was in the live engine, as an oracle.

    DS_ACCELERATOR=cpu python scripts/make_deepspeed_checkpoints.py OUT [--cases NAME ...] [--list]
    python scripts/make_deepspeed_checkpoints.py OUT --cases NAME ... --pack tests/convert/data/deepspeed.tar.xz

Needs deepspeed (`DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed`, with ninja and py-cpuinfo), which the
package itself never imports. Two gloo ranks train a tiny model for a few steps on the CPU; `OUT/CASE/checkpoint` is the
directory DeepSpeed wrote, `OUT/CASE/live.pt` (plain data) what `deepspeed_live.py` gathered from the engine. A case
that a machine cannot run (an operator that does not build) is left out with a line that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

RANKS = 2
STEPS = 3


class Net(nn.Module):
    """Small, with one of everything that importers stumble over; odd sizes, so that every slice is padded."""

    def __init__(self, *, frozen: bool = True, odd: bool = True, empty: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.first = nn.Linear(5, 11)
        self.base = nn.Linear(11, 3)
        self.second = nn.Linear(11, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(6, dtype=torch.float32).view(2, 3) / 3)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        if odd:
            self.scale = nn.Parameter(torch.tensor([1.5]))  # DeepSpeed cannot broadcast one without dimensions
            if empty:  # DeepSpeed's stage 3 cannot fetch one
                self.nothing = nn.Parameter(torch.empty(0, 3))
            self.unused = nn.Parameter(torch.linspace(-1, 1, 13))
        self.odd = odd
        if frozen:
            self.base.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(self.embedding(tokens)))
        hidden = self.norm(self.second(hidden) + self.base(hidden).sum(-1, keepdim=True))
        logits = self.head(hidden * self.scale if self.odd else hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten().roll(-1))


class Lion(torch.optim.Optimizer):
    """A momentum's sign; no step count. One of the optimizers that DeepSpeed's own conversion cannot read."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.add_(moment.mul(first).add(p.grad, alpha=1 - first).sign(), alpha=-group["lr"])
                    moment.mul_(second).add_(p.grad, alpha=1 - second)


Optimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    Attributes:
        stage: ZeRO stage.
        precision: "fp32", "bf16" or "fp16".
        zero: Further keys of the section zero_optimization.
        config: Further keys of DeepSpeed's config.
        groups: Number of param groups with hyper-parameters of their own: 1 or 2.
        optimizer: Makes the optimizer.
        model: Keywords of `Net`.
        init: Build the model inside of `deepspeed.zero.Init`.
        save: Keywords of `save_checkpoint`.
    """

    stage: int
    precision: str = "fp32"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    groups: int = 1
    optimizer: Optimizer = lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.05)
    model: dict[str, Any] = field(default_factory=dict)
    init: bool = False
    save: dict[str, Any] = field(default_factory=dict)


def _cpu_adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, lr=1e-2)


_CPU = {"offload_optimizer": {"device": "cpu"}}
_OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "plain_sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "lion": lambda groups: Lion(groups),
}
_BF16_FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}

CASES: dict[str, Case] = {
    "z0_fp32": Case(0),
    "z0_fp32_groups": Case(0, groups=2),
    "z0_bf16": Case(0, "bf16", config={"data_types": {"grad_accum_dtype": "bf16"}}),
    "z0_fp16": Case(0, "fp16"),
    "z0_fp16_groups": Case(0, "fp16", groups=2),
    **{f"z{stage}_{p}": Case(stage, p) for stage in (1, 2, 3) for p in ("fp32", "fp16")},
    **{f"z{stage}_bf16": Case(stage, "bf16") for stage in (2, 3)},
    "z1_bf16": Case(1, "bf16", config={"data_types": {"grad_accum_dtype": "bf16"}}),
    "bf16_optimizer": Case(1, "bf16", config=_BF16_FP32_GRADS),
    "bf16_optimizer_groups": Case(1, "bf16", config=_BF16_FP32_GRADS, groups=2),
    "z2_bf16_fp32_grads": Case(2, "bf16", config=_BF16_FP32_GRADS),
    "z1_groups": Case(1, groups=2),
    "z2_groups": Case(2, "bf16", groups=2),
    "z3_groups": Case(3, "bf16", groups=2),
    "z3_init": Case(3, "bf16", init=True),
    "z3_sub_groups": Case(3, zero={"sub_group_size": 40}, groups=2),
    "z3_persistent": Case(3, zero={"stage3_param_persistence_threshold": 20}),
    "z1_round_robin": Case(1, "bf16", zero={"round_robin_gradients": True}, groups=2),
    "z2_round_robin": Case(2, zero={"round_robin_gradients": True}, groups=2),
    "z1_elastic": Case(1, zero={"elastic_checkpoint": True}),
    "z2_elastic": Case(2, "bf16", zero={"elastic_checkpoint": True}, groups=2),
    "z1_cpu": Case(1, "bf16", zero=_CPU, config={"zero_force_ds_cpu_optimizer": False}),
    "z2_cpu": Case(2, zero=_CPU, config={"zero_force_ds_cpu_optimizer": False}, groups=2),
    "z3_cpu": Case(3, zero=_CPU, config={"zero_force_ds_cpu_optimizer": False}),
    "z2_cpu_adam": Case(2, "bf16", zero=_CPU, optimizer=_cpu_adam, groups=2),
    "z3_cpu_adam": Case(3, "bf16", zero=_CPU, optimizer=_cpu_adam),
    "z3_nvme": Case(3, zero={"sub_group_size": 40}, optimizer=_cpu_adam),
    "z2_no_frozen": Case(2, model={"frozen": False, "odd": False}),
    "z2_frozen_left_out": Case(2, save={"exclude_frozen_parameters": True}),
    **{f"z{stage}_{name}": Case(stage, optimizer=make) for stage in (1, 3) for name, make in _OPTIMIZERS.items()},
    "z0_sgd": Case(0, optimizer=_OPTIMIZERS["sgd"]),
}


def config_of(case: Case, folder: Path, name: str) -> dict[str, Any]:
    """DeepSpeed's config of a case."""
    zero = {"stage": case.stage, "stage3_param_persistence_threshold": 0, **case.zero} if case.stage else {"stage": 0}
    if name.endswith("nvme"):
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder / "nvme")}
    precision = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, **_FP16}}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        **precision[case.precision],
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}},
        "gradient_clipping": 1.0,
        **case.config,
    }


_FP16 = {"initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}


def param_groups(net: nn.Module, groups: int) -> list[dict[str, Any]]:
    """One group with all parameters, or matrices and the rest with a learning rate and weight decay of their own."""
    named = list(net.named_parameters())
    if groups == 1:
        return [{"params": [p for _, p in named]}]
    rest = [p for name, p in named if "bias" in name or "norm" in name or name in ("scale", "unused", "nothing")]
    matrices = [p for _, p in named if not any(p is q for q in rest)]
    return [{"params": matrices}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.95)}]


def run_case(name: str, folder: Path) -> None:
    """Trains and saves, on one rank of an initialised process group."""
    import deepspeed
    from deepspeed_live import live_state

    case = CASES[name]
    if case.precision == "fp16":  # torch computes it on any processor, DeepSpeed asks for a fast one
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    config = config_of(case, folder, name)
    torch.manual_seed(0)
    options = {"empty": case.stage < 3, **case.model}
    if case.init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            net = Net(**options)
    else:
        net = Net(**options)
    groups = param_groups(net, case.groups)
    if "Lion" in str(case.optimizer) or name.endswith(("lion", "sgd", "adagrad", "rmsprop")):
        for group in groups[1:]:
            group.pop("betas", None)
    trainable = [{**group, "params": list(group["params"])} for group in groups]
    optimizer = case.optimizer(trainable)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    for _ in range(STEPS):
        loss = engine(torch.randint(7, (2, 6), generator=generator))
        engine.backward(loss)
        engine.step()
    client = {"epoch": 3, "best": {"loss": 0.5, "names": ["a", "b"]}, "rng": torch.arange(4)}
    engine.save_checkpoint(str(folder / "checkpoint"), client_state=client, **case.save)
    live = live_state(engine)
    if torch.distributed.get_rank() == 0:
        torch.save({**live, "client_state": client, "case": _described(case)}, folder / "live.pt")


def _described(case: Case) -> dict[str, Any]:
    return {"stage": case.stage, "precision": case.precision, "groups": case.groups}


# ---- processes ----


def rank_main(folder: Path, names: list[str]) -> None:
    """One rank: all cases, one after the other; rank 0 reports those that could not run."""
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo")
    for name in names:
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        problem = ""
        try:
            run_case(name, target)
        except Exception as error:  # whatever it is, the next case may do
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            (target / f"error{dist.get_rank()}.txt").write_text(traceback.format_exc())
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if dist.get_rank() == 0:
            print(json.dumps({"case": name, "problem": next(filter(None, problems), "")}), flush=True)
    os._exit(0)  # DeepSpeed's helpers must not keep the process


def make(folder: Path, names: list[str], timeout: float = 500.0) -> dict[str, str]:
    """Runs cases on two ranks of this machine.

    Args:
        folder: Where; a directory per case.
        names: Of `CASES`.
        timeout: Seconds for all.

    Returns:
        Case -> why it could not run, or "".

    Raises:
        RuntimeError: With the ranks' output, if they end otherwise than by themselves.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    common |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0"}
    with _operators() as cache:
        return _run(folder, names, timeout, {**common, "TORCH_EXTENSIONS_DIR": str(cache)})


@contextlib.contextmanager
def _operators() -> Iterator[Path]:
    """A cache of DeepSpeed's compiled operators, for one run at a time.

    torch guards a build by a file that a killed run leaves behind, and every later one waits for ever.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "zero_strategy_deepspeed_operators"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "in_use", "w") as watchdog:
        fcntl.flock(watchdog, fcntl.LOCK_EX)
        for stale in cache.rglob("lock"):
            stale.unlink()
        yield cache


def _run(folder: Path, names: list[str], timeout: float, variables: dict[str, str]) -> dict[str, str]:
    command = [sys.executable, __file__, str(folder), "--rank", "--cases", *names]
    processes = []
    for rank in range(RANKS):
        env = {**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(folder / f"rank{rank}.log", "w") as log:
            out = subprocess.PIPE if rank == 0 else log
            processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=log, text=True))
    try:
        output, _ = processes[0].communicate(timeout=timeout)
        codes = [process.wait(timeout=30) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}: {(folder / 'rank0.log').read_text()[-2000:]}")
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
    return {entry["case"]: entry["problem"] for entry in found}


def pack(folder: Path, names: list[str], archive: Path) -> None:
    """Puts cases into one compressed archive, without the scripts that DeepSpeed copies beside its checkpoints."""

    def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return None if entry.name.endswith((".py", ".txt")) else entry

    with tarfile.open(archive, "w:xz", preset=9) as target:
        for name in sorted(names):
            target.add(folder / name, name, filter=anonymous)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--cases", nargs="*", default=list(CASES), metavar="NAME", help="which (default: all)")
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="put what was written before into an archive instead")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return
    if options.pack:
        pack(options.folder, options.cases, options.pack)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.rank:
        rank_main(options.folder, options.cases)
    for name, problem in make(options.folder.absolute(), options.cases).items():
        print(f"{name}: {problem or 'written'}")


if __name__ == "__main__":
    main()
