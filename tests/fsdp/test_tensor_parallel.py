"""Models that `parallelize_module` has divided, sharded among the data-parallel ranks, against one process."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.divided import CLIP, MICRO_BATCHES, STEPS, adamw, gpt, loss_of, parallelize, tokens, train_plain
from tests.launcher import Launcher
from zero_strategy.comm.mesh import make_device_mesh
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine


def begin(stage: int, tensor: int = 2, *, sequence: bool = False, **settings: Any) -> tuple[Any, ZeroEngine, Any, int]:
    """A model divided among so many ranks, its engine and optimizer, and which copy of it this rank has a part of."""
    model, copy = gpt(), torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if tensor > 1:
        mesh = make_device_mesh("cpu", tensor=tensor)
        parallelize(model, mesh["tp"], sequence=sequence)
        copy = mesh["dp"].get_local_rank()
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}, **settings))
    optimizer = adamw(model)
    engine.attach(optimizer)
    return model, engine, optimizer, copy


def run_steps(model: Any, engine: ZeroEngine, optimizer: Any, copy: int) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(0.0)
        for micro in range(MICRO_BATCHES):
            with engine.no_sync() if micro < MICRO_BATCHES - 1 else nullcontext():
                loss = loss_of(model, tokens(copy, step, micro))
                loss.backward()
                losses[-1] += float(loss.detach())
        norms.append(float(engine.clip_grad_norm_(CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def train(stage: int, sequence: bool, reduction: str | None) -> dict[str, Any]:
    model, engine, optimizer, copy = begin(stage, sequence=sequence, gradient_reduction=reduction)
    before = list(model.parameters())
    losses, norms = run_steps(model, engine, optimizer, copy)
    assert all(one is other for one, other in zip(before, model.parameters()))
    return {"copy": copy, "losses": losses, "norms": norms, "weights": engine.full_state_dict()}


def train_all(alike: list[int], sequences: list[int]) -> list[dict[str, Any]]:
    same = [train(stage, False, "per_step") for stage in alike]
    return [*same, *(train(stage, True, None) for stage in sequences)]


@pytest.mark.parametrize(("world", "alike", "sequences"), [(2, [1, 3], []), (4, [0, 1, 2, 3], [1, 3])])
def test_every_stage_trains_what_one_process_trains(
    ranks: Launcher, world: int, alike: list[int], sequences: list[int]
) -> None:
    losses, norms, weights = train_plain(world // 2)
    by_rank = ranks(world)(train_all, alike, sequences)
    for other in by_rank[0][1 : len(alike)]:  # bit by bit, whatever the stage
        assert all(value.equal(by_rank[0][0]["weights"][name]) for name, value in other["weights"].items())
    for found in (one for everything in by_rank for one in everything):
        expected = [one[found["copy"]] for one in losses]
        torch.testing.assert_close(found["losses"], expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(found["norms"], norms, rtol=1e-6, atol=0)
        assert list(found["weights"]) == list(weights)
        for name, value in found["weights"].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6, msg=name)


def refused(stage: int) -> str:
    """The message about a matrix of a block that two ranks divide, and none about what they all have whole."""
    model = gpt()
    mesh = make_device_mesh("cpu", tensor=2)
    parallelize(model, mesh["tp"])
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}))
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    whole = [p for p in matrices.values() if not isinstance(p, torch.distributed.tensor.DTensor)]
    engine.attach(torch.optim.Muon(whole))
    with pytest.raises(ValueError, match="Muon needs whole matrices, and tensor parallelism divides") as caught:
        engine.attach(torch.optim.Muon(matrices.values()))
    engine.close()
    return str(caught.value)


def test_muon_refuses_what_is_divided_at_every_stage(ranks: Launcher) -> None:
    for stage in (0, 1, 3):
        said = ranks(2)(refused, stage)
        assert said[0] == said[1] and ".weight'" in said[0] and "AdamW" in said[0]


# --------------------------------------------------------------------------------------------------- checkpoints


def save(stage: int, tensor: int, source: str | None, folder: str, settings: dict[str, Any]) -> None:
    """Train, or load; then save, in the background or not."""
    model, engine, optimizer, copy = begin(stage, tensor, **settings)
    if source is None:
        run_steps(model, engine, optimizer, copy)
    else:
        engine.load(source)
    engine.save(folder, asynchronous=tensor == 2).wait()
    if source is None:  # goes on after loading as it would have
        here = losses_after(model, engine, optimizer, copy)
        engine.load(folder)
        assert losses_after(model, engine, optimizer, copy) == here


def losses_after(model: Any, engine: ZeroEngine, optimizer: Any, copy: int) -> list[float]:
    return run_steps(model, engine, optimizer, copy)[0]


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def test_a_checkpoint_has_the_same_bytes_whatever_divides_the_model(ranks: Launcher, tmp_path: Path) -> None:
    first, offload = str(tmp_path / "first"), {"optimizer": "cpu", "parameters": "cpu"}
    ranks(4)(save, 2, 2, None, first, {})
    expected = tensor_files(tmp_path / "first")
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / "first" / "model.safetensors").items()}
    assert shapes == {name: tensor.shape for name, tensor in gpt().state_dict().items() if name != "head.weight"}
    runs: list[tuple[int, int, int, dict[str, Any]]] = [
        (1, 1, 0, {}),
        (2, 1, 3, {}),
        (2, 2, 0, {}),
        (4, 4, 1, {}),
        (4, 2, 3, {"offload": offload}),
        (4, 2, 1, {"mesh": {"replicate": 2}}),
    ]
    for number, (world, tensor, stage, settings) in enumerate(runs):
        folder = tmp_path / str(number)
        ranks(world)(save, stage, tensor, first, str(folder), settings)
        assert tensor_files(folder) == expected, (world, tensor, stage)
