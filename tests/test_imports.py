"""Importing the engine loads what it needs to be defined, and nothing that takes long and is needed later or never."""

from __future__ import annotations

import subprocess
import sys

LATER = [
    "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor",
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.utils.cpp_extension", "torch.utils.data",
    "omegaconf", "yaml", "sympy", "safetensors", "fsspec", "tqdm", "matplotlib", "hydra", "lightning", "accelerate",
    "transformers",
]  # fmt: skip
SCRIPT = f"""
import sys
import torch
before = set(sys.modules)
from zero_strategy import ZeroEngine, load_config
load_config({{"stage": 3, "mesh": {{"replicate": 1}}}}, prefetch=2)
loaded = set(sys.modules) - before
print(sorted(name for name in {LATER} if name in loaded))
"""


def test_the_engine_s_class_and_a_config_load_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
