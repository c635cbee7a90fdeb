"""Accelerate's scripts with our class in place of its own; a script itself: `upstream.py NAME STAGE [REDUCTION]`.

`test_sync_matrix` is the part of `test_sync` that it leaves out on the CPU: accumulation with all kinds of loaders.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))

from zero_strategy.integrations.accelerate import ZeroAccelerator


def staged(stage: int, reduction: str | None) -> type[ZeroAccelerator]:
    class Staged(ZeroAccelerator):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            config = {"stage": stage, "units": {"min_numel": 0}, "gradient_reduction": reduction}
            super().__init__(*arguments, zero_config=config, **keywords)

    return Staged


def seeded(seed: int | None = None, make: Any = np.random.default_rng) -> np.random.Generator:
    """The scripts draw their data unseeded, and compare gradients of it by a relative error: one near zero fails."""
    generator: np.random.Generator = make(7 if seed is None else seed)
    return generator


def run(name: str, stage: int, reduction: str | None = None) -> str:
    """Output at the end; the script raises where it is not satisfied."""
    processes = ZeroAccelerator().num_processes  # the scripts ask for the state before they make one
    script: Any = importlib.import_module(f"accelerate.test_utils.scripts.{name.removesuffix('_matrix')}")
    ours = patch.object(script, "Accelerator", staged(stage, reduction), create=name == "test_ops")  # which makes none
    with ours, patch.object(np.random, "default_rng", seeded):
        if name == "test_sync_matrix":
            for case in itertools.product([True, False], repeat=3):
                script.test_gradient_accumulation(*case)
                script.test_gradient_accumulation_with_opt_and_scheduler(*case)
        else:
            script.main()
    return f"passed: {name} {stage} {processes}"


def run_here(*words: str) -> str:
    """On the ranks of a pool, which are set up as the launcher sets up its processes."""
    from tests.integrations.accelerate.training import fresh_state

    name, stage, *reduction = words
    with fresh_state():
        return run(name, int(stage), *reduction)


if __name__ == "__main__":
    passed = run(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
    if os.environ["RANK"] == "0":
        print(passed)
