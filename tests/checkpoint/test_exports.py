"""Weights for others, in any dtype; frozen weights that are named instead of stored."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests.engine.nets import net
from tests.launcher import Launcher
from zero_strategy.checkpoint import CheckpointReader
from zero_strategy.checkpoint.agreement import digest
from zero_strategy.checkpoint.exports import export_weights
from zero_strategy.checkpoint.writer import unlisted
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool]


def engine_of(module: nn.Module, stage: int, compute_dtype: torch.dtype | None = None, **checkpoint: Any) -> ZeroEngine:
    config = load_config(stage=stage, units={"min_numel": 0}, barrier_seconds=10.0, checkpoint=checkpoint)
    return ZeroEngine(module, config, compute_dtype=compute_dtype)


def train(engine: ZeroEngine, steps: int = 1) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    optimizer = engine.optimizers[0].optimizer
    dtype = engine.model.compute_dtype or torch.float32
    for _ in range(steps):
        engine.module(torch.randn(4, 6, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- another dtype ----


class Config:
    def to_json_string(self) -> str:
        return json.dumps({"model_type": "net"})


def export(folder: Path, stage: int, compute_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    module = net()
    module.register_buffer("count", torch.tensor(3))
    module.config = Config()  # type: ignore[assignment]
    engine = engine_of(module, stage, compute_dtype)
    engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    train(engine)
    for dtype in (None, torch.bfloat16, torch.float32):
        engine.save_pretrained(folder / str(dtype), dtype=dtype)
    from zero_strategy.optim.full_state import safe_get_full_fp32_param

    with pytest.raises(ValueError, match="optimizers=False"):
        engine.save(folder / "x", weights_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="floating-point"):
        engine.save_pretrained(folder / "x", dtype=torch.int8)
    masters = {f"master {name}": safe_get_full_fp32_param(p) for name, p in engine.model.names()}
    return {**engine.full_state_dict(), **masters}


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_dtype_is_chosen_at_save(
    tmp_path: Path, ranks: Launcher, stage: int, compute_dtype: torch.dtype | None
) -> None:
    live = ranks(2)(export, tmp_path, stage, compute_dtype)[0]
    names = {name for name in live if not name.startswith("master ")}
    for dtype in (None, torch.bfloat16, torch.float32):
        weights = load_file(tmp_path / str(dtype) / "model.safetensors")
        assert weights.keys() == names
        for name, value in weights.items():
            expected = live[name]
            if expected.is_floating_point() and dtype is not None:
                wide = dtype == torch.float32 and f"master {name}" in live
                expected = live[f"master {name}"] if wide else expected.to(dtype)
            assert torch.equal(value, expected) and value.dtype == expected.dtype, (dtype, name)
        config = json.loads((tmp_path / str(dtype) / "config.json").read_text())
        stored = dtype or compute_dtype or torch.float32
        assert config == {"model_type": "net", "architectures": ["Net"], "dtype": str(stored).removeprefix("torch.")}


# ---- digests ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digests_of_parts_add_up(dtype: torch.dtype) -> None:
    generator = random.Random(1)
    count = 150_000
    whole = (torch.randn(count, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    for _ in range(3):
        cuts = sorted([0, count, *(generator.randrange(count) for _ in range(4))])
        parts = [digest(whole[a:b], a) for a, b in pairwise(cuts)]
        assert sum(parts) % 2**64 == digest(whole, 0)
    other = whole.clone()
    other[[5, 140_000]] = other[[140_000, 5]]
    assert torch.equal(other, whole) or digest(other, 0) != digest(whole, 0)
    longer = torch.cat([whole, torch.zeros(1, dtype=dtype)])
    assert digest(longer, 0) != digest(whole, 0)


# ---- frozen weights ----


def with_adapter(seed: int) -> nn.Module:
    module = net(seed=seed)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    return module


def save_adapter(folder: Path, stage: int) -> dict[str, torch.Tensor]:
    module = with_adapter(0)
    engine = engine_of(module, stage, frozen="reference")
    engine.attach(torch.optim.AdamW([p for p in module.parameters() if p.requires_grad]))
    train(engine, 2)
    engine.save(folder)
    return engine.full_state_dict()


def load_adapter(folder: Path, stage: int, seed: int, spoil: bool) -> dict[str, torch.Tensor] | str:
    module = with_adapter(seed)
    with torch.no_grad():
        module.head.weight.zero_()  # type: ignore[union-attr, operator]
        if spoil:
            module.blocks[1].up.bias[3] += 1e-3  # type: ignore[union-attr, index]
    engine = engine_of(module, stage)
    engine.attach(torch.optim.AdamW([p for p in module.parameters() if p.requires_grad]))
    try:
        engine.load(folder)
    except ValueError as error:
        return str(error)
    return engine.full_state_dict()


def test_frozen_weights_are_referred_to(tmp_path: Path, ranks: Launcher) -> None:
    folder = tmp_path / "c"
    saved = ranks(2)(save_adapter, folder, 3)[0]
    reader = CheckpointReader(folder)
    assert set(reader.weights) == {"head.weight", "head.bias"}
    for world, stage in ((2, 3), (3, 1), (2, 0)):
        for loaded in ranks(world)(load_adapter, folder, stage, 0, False):
            assert not isinstance(loaded, str), loaded
            assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    for message in ranks(2)(load_adapter, folder, 3, 0, True):
        assert isinstance(message, str)
        assert "with other values (1): blocks.1.up.bias" in message and "Load the base weights" in message
    (message,) = {str(text) for text in ranks(2)(load_adapter, folder, 3, 5, False)}
    assert "stem.weight" in message and "blocks.2.down.weight" in message and "head" not in message


# ---- beside other people's files ----


@pytest.mark.parametrize("manifest", ['{"name": "my web app"}', "of no kind", "ours, damaged"])
def test_an_export_beside_a_manifest_that_tells_nothing_removes_nothing(tmp_path: Path, manifest: str) -> None:
    engine = engine_of(net(), 0)
    if manifest == "ours, damaged":
        engine.save(tmp_path / "app", optimizers=False, update_latest=False).finish()
        manifest = (tmp_path / "app" / "manifest.json").read_text().replace('"world_size": 1', '"world_size": 2')
    else:
        (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text(manifest)
    (tmp_path / "app" / "data").mkdir()
    (tmp_path / "app" / "data" / "thesis.tex").write_text("precious")
    before = {path: path.read_bytes() for path in (tmp_path / "app").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"app/manifest\.json.*export to another directory"):
        export_weights(engine, tmp_path / "app", {})
    assert {path: path.read_bytes() for path in (tmp_path / "app").rglob("*") if path.is_file()} == before


def test_files_beside_somebody_else_s_manifest_are_all_somebody_else_s(tmp_path: Path) -> None:
    for name in ("manifest.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert [path.name for path in unlisted(tmp_path)] == ["manifest.json", "model.safetensors"]
