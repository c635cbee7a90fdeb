"""Saved weights load by `from_pretrained` where this package is not installed; Hugging Face's load in shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.launcher import Launcher
from tests.warm import run_warm
from zero_strategy.config import load_config
from zero_strategy.convert.convert import convert
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.init import Init

_LOAD = """
import sys
sys.modules["zero_strategy"] = None  # an import of it fails
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
assert model.lm_head.weight is model.transformer.wte.weight
torch.save(dict(model.state_dict()), sys.argv[2])
"""


def from_pretrained(directory: Path, result: Path) -> dict[str, torch.Tensor]:
    """The state dict of the model that another process loads."""
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    done = run_warm(_LOAD, str(directory), str(result), env=environment, cwd=directory)
    assert done.returncode == 0, done.stderr
    assert "newly initialized" not in done.stderr and "not used" not in done.stderr
    return dict(torch.load(result, weights_only=True))


@pytest.fixture
def model() -> Any:
    library: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = library.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    return library.GPT2LMHeadModel(config)


@pytest.mark.parametrize("limit", [3000, 5_000_000_000])
def test_a_checkpoint_is_a_model_directory(model: Any, tmp_path: Path, limit: int) -> None:
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config
    engine = ZeroEngine(model, load_config(stage=3, checkpoint={"max_file_bytes": limit}))
    engine.attach(torch.optim.AdamW(model.parameters()))
    engine.save(tmp_path / "saved")
    config.save_pretrained(tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("model*.safetensors"))) == (1 if limit > 10**6 else 4)
    found = from_pretrained(tmp_path / "saved", tmp_path / "found.pt")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    convert(tmp_path / "saved", tmp_path / "narrow", to_format="hf", dtype=torch.bfloat16)
    narrow = from_pretrained(tmp_path / "narrow", tmp_path / "narrow.pt")
    assert all(torch.equal(narrow[name], tensor.bfloat16()) for name, tensor in expected.items())


def test_what_from_pretrained_saves_loads_in_shards(model: Any, tmp_path: Path) -> None:
    library: Any = pytest.importorskip("transformers")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    other = library.GPT2LMHeadModel(model.config)
    held = {name: (value, value.clone()) for name, value in other.state_dict().items()}
    engine = ZeroEngine(other, load_config(stage=3, units={"min_numel": 0}), weights=tmp_path / "theirs")
    assert all(torch.equal(value, copy) for value, copy in held.values()), "others may hold what the module had"
    whole = engine.full_state_dict()
    assert all(torch.equal(whole[name], tensor) for name, tensor in model.state_dict().items())


# ---- memory ----

WIDTH, DEPTH = 1024, 20  # 4 MiB per layer, 80 MiB in all
MIB = 1 << 20
SLACK = {"float32": 8 * MIB, "bfloat16": 24 * MIB}
"""Code that is loaded meanwhile; and, where values are converted, what malloc keeps for each of two reading threads."""


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def status(key: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(key)).split()[1]) * 1024


def load_and_measure(directory: str, dtype: str) -> tuple[int, int]:
    """Growth of the peak of resident memory, and bytes of this rank's shard, master weights included."""
    torch.set_num_threads(1)
    with Init():
        warm = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    ZeroEngine(warm, load_config(stage=3, units={"min_numel": 0}), weights=os.path.join(directory, "warm"))
    with Init():
        model = layers().to(getattr(torch, dtype))
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    engine = ZeroEngine(model, load_config(stage=3, units={"min_numel": 0}), weights=os.path.join(directory, "big"))
    growth = status("VmHWM") - before
    masters = sum(bucket.master.nbytes for bucket in engine.model.buckets if bucket.has_master)
    return growth, masters + sum(bucket.shard.nbytes for bucket in engine.model.buckets)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_needs_its_shard_and_one_tensor(ranks: Launcher, tmp_path: Path, dtype: str) -> None:
    """bfloat16: from the same fp32 file, converted on the way."""
    for name in ("warm", "big"):
        (tmp_path / name).mkdir()
    save_file({f"{i}.weight": torch.full((8, 8), 1.0 + i) for i in range(2)}, tmp_path / "warm" / "model.safetensors")
    big = {name: torch.ones_like(tensor) for name, tensor in layers().state_dict().items()}
    save_file(big, tmp_path / "big" / "model.safetensors")
    tensor = WIDTH * WIDTH * 4
    for growth, shard in ranks(2)(load_and_measure, str(tmp_path), dtype):
        assert shard == DEPTH * tensor // 2 * (1 if dtype == "float32" else 1.5)
        assert growth <= shard + tensor + SLACK[dtype], f"{growth / MIB:.1f} MiB for a shard of {shard / MIB:.1f} MiB"
