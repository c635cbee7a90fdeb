"""Work of the ranks of the real DeepSpeed in tests: load, look inside, take a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

GROUPS = ({"weight_decay": 0.1, "lr": 0.01}, {"weight_decay": 0.0, "lr": 0.02})
SEED_OF_DATA = 7


class Net(nn.Module):
    """Two groups of parameters, a buffer, a tied weight; odd sizes, so that slices are padded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.back = nn.Linear(7, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.hidden(self.embed(tokens)))) * self.scale.to(self.norm.weight.dtype)
        return self.out(self.back(hidden))


def groups_of(module: nn.Module, count: int = 2) -> list[dict[str, Any]]:
    """Matrices and the rest; or one group."""
    named = list(module.named_parameters())
    if count == 1:
        return [{**GROUPS[0], "params": [p for _, p in named]}]
    return [
        {**GROUPS[0], "params": [p for _, p in named if p.dim() > 1]},
        {**GROUPS[1], "params": [p for _, p in named if p.dim() == 1]},
    ]


def loss_of(module: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED_OF_DATA)
    tokens = torch.randint(0, 11, (4, 5), generator=generator)
    return nn.functional.cross_entropy(module(tokens).float().flatten(0, 1), tokens.flatten())


def config(stage: int, dtype: str, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16", "initial_scale_power": 4},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **extra,
    }


def engine_of(stage: int, dtype: str, groups: int = 2, **extra: Any) -> Any:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if dtype == "float16":  # DeepSpeed says that CPUs cannot; torch's can
        get_accelerator().is_fp16_supported = lambda: True
    module = Net()
    optimizer = torch.optim.AdamW(groups_of(module, groups), betas=(0.8, 0.9))
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config(stage, dtype, **extra))
    return engine


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        engine.backward(loss_of(engine))
        engine.step()


def contents(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Kind -> parameter -> whole fp32 tensor, put together from the ranks' flat buffers."""
    shapes = engine._get_zero_param_shapes()
    stage3 = engine.zero_optimization_stage() == 3
    optimizer, world = engine.optimizer, dist.get_world_size()
    flat = optimizer.fp32_partitioned_groups_flat if stage3 else None
    if flat is None:
        flat = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
    found: dict[str, dict[str, torch.Tensor]] = {}
    for mine, named in zip(flat, shapes, strict=True):
        state = optimizer.optimizer.state[mine]
        for kind, values in {"fp32": mine, **state}.items():
            if not torch.is_tensor(values) or values.shape != mine.shape:
                continue
            parts = [torch.empty_like(values) for _ in range(world)]
            dist.all_gather(parts, values.detach().contiguous())
            at = 0
            whole = torch.cat(parts)
            for name, shape in named.items():
                count = shape.numel()
                if stage3:
                    each = -(-count // world)
                    flat_values = torch.cat([part[at : at + each] for part in parts])[:count]
                    at += each
                else:
                    flat_values = whole[at : at + count]
                    at += count
                found.setdefault(kind, {})[name] = flat_values.view(shape).clone()
    return found


def steps_and_groups(engine: Any) -> tuple[list[float], list[dict[str, Any]]]:
    inner = engine.optimizer.optimizer
    steps = [float(state["step"]) for state in inner.state.values() if "step" in state]
    return steps, [{key: group[key] for key in ("lr", "weight_decay", "betas")} for group in inner.param_groups]


def own_step_counts(engine: Any) -> bool:
    """Turns numbers of steps, which DeepSpeed's optimizers keep, into the tensors that torch's want."""
    states = [state for state in engine.optimizer.optimizer.state.values() if "step" in state]
    numbers = [state for state in states if not torch.is_tensor(state["step"])]
    for state in numbers:
        state["step"] = torch.tensor(float(state["step"]))
    return bool(numbers)


def load_universal(argument: dict[str, Any]) -> list[dict[str, Any]]:
    """For each case: load, look, take one step, look."""
    results = []
    for stage, dtype, groups in argument["cases"]:
        extra = {"checkpoint": {"load_universal": True}, **argument.get("config", {})}
        engine = engine_of(stage, dtype, groups, **extra)
        path, client_state = engine.load_checkpoint(
            argument["paths"][f"{dtype}-{groups}"], load_lr_scheduler_states=False
        )
        loaded = contents(engine)
        numbers = own_step_counts(engine)
        steps, hyper = steps_and_groups(engine)
        counters = (engine.global_steps, engine.global_samples, engine.skipped_steps)
        scale = getattr(engine.optimizer, "cur_scale", None)
        train(engine, 1)
        results.append(
            {
                "path": path, "client_state": {k: v for k, v in client_state.items() if k in ("note", "table")},
                "loaded": loaded, "steps": steps, "groups": hyper, "numbers": numbers, "counters": counters,
                "scale": scale,
                "stepped": contents(engine),
            }
        )  # fmt: skip
    return results


# ---- pipelines ----


def _logits(embed: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(hidden, embed.weight)


class Block(nn.Module):
    """A layer with a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden)) * self.scale.to(hidden.dtype)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def save_pipeline(argument: dict[str, Any]) -> dict[str, Any]:
    """Trains two stages with a tied embedding, saves, and returns what this stage's optimizer has in memory."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    torch.manual_seed(3)
    layers = [
        TiedLayerSpec("embed", nn.Embedding, 11, 6),
        LayerSpec(Block, 6),
        torch.tanh,
        LayerSpec(Block, 6),
        LayerSpec(nn.LayerNorm, 6),
        TiedLayerSpec("embed", nn.Embedding, 11, 6, forward_fn=_logits),
    ]
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=_loss, partition_method="uniform")
    settings = config(1, argument["dtype"], gradient_accumulation_steps=2)
    if argument["dtype"] == "bfloat16":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    optimizer = torch.optim.AdamW(groups_of(module), betas=(0.8, 0.9))
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    generator = torch.Generator().manual_seed(SEED_OF_DATA)
    tokens = torch.randint(0, 11, (4, 5), generator=generator)
    for _ in range(3):
        engine.train_batch(iter([(tokens, tokens)] * 2))
    engine.save_checkpoint(argument["path"], tag="step3", client_state={"note": "pipe"})
    flat = getattr(engine.optimizer, "single_partition_of_fp32_groups", None)
    flat = flat or engine.optimizer.fp32_groups_flat_partition
    found: dict[str, dict[str, torch.Tensor]] = {}
    for mine, named in zip(flat, engine._get_zero_param_shapes(), strict=True):
        for kind, values in {"fp32": mine, **engine.optimizer.optimizer.state[mine]}.items():
            at = 0
            for name, shape in named.items() if torch.is_tensor(values) and values.shape == mine.shape else ():
                found.setdefault(kind, {})[name] = values[at : at + shape.numel()].detach().view(shape).clone()
                at += shape.numel()
    found["module"] = {name: p.detach().clone() for name, p in module.named_parameters()}
    return found


# ---- DeepSpeed's own converter ----


def save_and_convert(argument: dict[str, Any]) -> list[dict[str, Any]]:
    """For each case: train, save, convert with DeepSpeed's converter; returns what is in memory."""
    import argparse

    from deepspeed.checkpoint import ds_to_universal

    results = []
    for number, (stage, dtype, groups) in enumerate(argument["cases"]):
        engine = engine_of(stage, dtype, groups, **argument.get("config", {}))
        train(engine, 3)
        root = f"{argument['path']}/{number}"
        engine.save_checkpoint(root, tag="step3", client_state={"note": "theirs"})
        if dist.get_rank() == 0:
            options = {"input_folder": f"{root}/step3", "output_folder": f"{root}/step3_universal", "strict": True}
            more = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
            ds_to_universal.main(argparse.Namespace(**options, **more, inject_missing_state=True))
        dist.barrier()
        results.append({"live": contents(engine), "steps": steps_and_groups(engine)})
    return results
