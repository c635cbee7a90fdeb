"""Work of ranks of the real DeepSpeed for `test_against_deepspeed`."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from tests.compat.scripts import old_script


def train(argument: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the script with each of the config files."""
    import deepspeed

    found = []
    for path in argument["configs"]:
        result = old_script.main(deepspeed, ["--deepspeed_config", path, "--steps", str(argument["steps"])])
        norm = result["norm"]
        found.append({key: result[key] for key in ("losses", "rates", "steps")} | {"norm": norm and float(norm)})
    return found


def optimizer() -> torch.optim.Optimizer:
    """Two groups."""
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.1, 0.02)]
    return torch.optim.Adam(groups)


def schedule(kind: Any, options: dict[str, Any], steps: int) -> list[list[Any]]:
    """Learning rates and betas of both groups, before the first `step()` and after each."""
    made = kind(optimizer(), **options)
    found = []
    for _ in range(steps):
        found.append([[group["lr"], *group["betas"]] for group in made.optimizer.param_groups])
        made.step()
    return found


def schedules(argument: dict[str, Any]) -> list[list[list[Any]]]:
    """DeepSpeed's own schedules."""
    module = importlib.import_module("deepspeed.runtime.lr_schedules")
    return [schedule(getattr(module, name), options, argument["steps"]) for name, options in argument["cases"]]
