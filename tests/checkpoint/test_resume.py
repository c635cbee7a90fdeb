"""A checkpoint of any world size and stage resumes at any other, and says by name what does not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.nets import Block, net
from tests.launcher import Launcher
from tests.models import Transformer, build, loss_fn, make_batch, param_groups
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import full_state

ROWS = 12
"""Of a global batch: divides by 1, 2, 3 and 4 ranks."""
BEFORE, AFTER = 3, 3
SHAPES = [(world, stage) for world in (1, 2, 3, 4) for stage in (0, 1, 2, 3)]
"""World size and stage."""
CONTINUED = [(2, 3), (1, 1), (3, 2), (4, 3), (2, 0), (2, 1)]


def world_and_rank() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def make(stage: int, seed: int = 3, **options: Any) -> tuple[nn.Module, ZeroEngine, torch.optim.Optimizer]:
    model = build("transformer", seed)
    dtype = options.pop("compute_dtype", None)
    config = load_config(stage=stage, units={"min_numel": 0}, barrier_seconds=10.0, **options)
    engine = ZeroEngine(model, config, compute_dtype=dtype)
    optimizer = torch.optim.AdamW(param_groups(model), foreach=False, amsgrad=True)
    engine.attach(optimizer)
    return model, engine, optimizer


def run(model: nn.Module, engine: ZeroEngine, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of the global batch."""
    world, rank = world_and_rank()
    losses = []
    for step in steps:
        rows = ROWS // world
        loss = loss_fn(model, make_batch("transformer", step, ROWS)[rows * rank : rows * (rank + 1)])
        loss.backward()
        engine.clip_grad_norm_(1.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    everyone: list[Any] = [losses]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, losses)
    return [sum(column) / world for column in zip(*everyone, strict=True)]


def picture(engine: ZeroEngine) -> dict[str, Any]:
    """Everything that a checkpoint holds."""
    found: dict[str, Any] = dict(engine.full_state_dict())
    for number, sharded in enumerate(engine.optimizers):
        for name, values in engine.full_optimizer_state(sharded.optimizer).items():
            found |= {f"{number} {name} {key}": torch.as_tensor(value) for key, value in values.items()}
        found[f"{number} groups"] = [
            {key: value for key, value in group.items() if key != "params"} for group in sharded.optimizer.param_groups
        ]
    for name, p in engine.model.names():
        found[f"master {name}"] = full_state.safe_get_full_fp32_param(p)
    return found


def unequal(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    found = sorted(actual.keys() ^ expected.keys())
    for key in actual.keys() & expected.keys():
        a, e = actual[key], expected[key]
        if not (torch.equal(a, e) if isinstance(a, Tensor) else a == e):
            found.append(key)
    return found


def digests(folder: str) -> dict[str, str]:
    files = sorted(path for path in Path(folder).rglob("*.safetensors"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ------------------------------------------------------------------------------------------------------ resume


def train_and_save(folder: str, stage: int) -> dict[str, Any]:
    model, engine, optimizer = make(stage)
    model.version.fill_(17)
    run(model, engine, optimizer, range(BEFORE))
    optimizer.param_groups[0]["lr"] = 0.0005
    optimizer.param_groups[0]["note"] = ("a", 1.5, None, True)
    engine.save(folder, user={"epoch": 3, "names": ["x"]}, extra_files={"notes/a.txt": b"hello"})
    before = picture(engine)
    losses = run(model, engine, optimizer, range(BEFORE, BEFORE + AFTER))
    return {"picture": before, "losses": losses, "end": picture(engine)}


def resume(folder: str, again: str, stage: int, trains: bool) -> dict[str, Any]:
    model, engine, optimizer = make(stage, seed=8)
    if trains:
        run(model, engine, optimizer, range(1))  # has state of its own, which must go
    reader = engine.load(folder)
    found = {"picture": picture(engine), "user": dict(reader.manifest.user), "note": reader.extra("notes/a.txt")}
    engine.save(again)
    if not trains:
        return found
    return found | {"losses": run(model, engine, optimizer, range(BEFORE, BEFORE + AFTER)), "end": picture(engine)}


def plain_losses() -> list[float]:
    """An uninterrupted run on the whole batch."""
    model = build("transformer", 3)
    optimizer = torch.optim.AdamW(param_groups(model), foreach=False, amsgrad=True)
    losses = []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            optimizer.param_groups[0]["lr"] = 0.0005
        loss = loss_fn(model, make_batch("transformer", step, ROWS))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[BEFORE:]


def test_resume_at_other_world_sizes_and_stages(ranks: Launcher, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    saved = ranks(2)(train_and_save, folder, 3)[0]
    plain = plain_losses()
    assert saved["losses"] == pytest.approx(plain, abs=1e-6)
    for world, stage in SHAPES:
        again = str(tmp_path / f"again-{world}-{stage}")
        trains = (world, stage) in CONTINUED
        for found in ranks(world)(resume, folder, again, stage, trains):
            assert not unequal(found["picture"], saved["picture"]), (world, stage)
            if not trains:
                continue
            assert found["losses"] == pytest.approx(plain, abs=1e-6), (world, stage)
            assert found["user"]["epoch"] == 3 and found["user"]["names"] == ["x"] and found["note"] == b"hello"
            if world == 2:
                assert found["losses"] == saved["losses"]
                assert not unequal(found["end"], saved["end"])
        assert digests(again) == digests(folder), "the same bytes for every world size and stage"


def test_weights_open_anywhere(ranks: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    saved = ranks(2)(train_and_save, str(folder), 3)[0]["picture"]
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    plain = build("transformer", 3)
    state = plain.state_dict()
    assert list(state.keys() - weights.keys()) == ["head.weight"]
    assert {name: value.shape for name, value in weights.items()} == {n: state[n].shape for n in weights}
    assert all(torch.equal(value, saved[name]) for name, value in weights.items())
    assert weights["version"].item() == 17
    moments = safetensors.torch.load_file(folder / "optimizer" / "exp_avg.safetensors")
    assert "unused" not in moments and "empty" in moments and moments["scale"].shape == ()


# -------------------------------------------------------------------------------------------- master weights


def save_halves(folder: str) -> dict[str, Any]:
    model, engine, optimizer = make(3, compute_dtype=torch.bfloat16)
    run(model, engine, optimizer, range(2))
    engine.save(folder)
    return {"picture": picture(engine), "losses": run(model, engine, optimizer, range(2, 4))}


def load_halves(folder: str, stage: int, dtype: torch.dtype | None) -> dict[str, Any]:
    model, engine, optimizer = make(stage, seed=8, compute_dtype=dtype)
    engine.load(folder)
    return {"picture": picture(engine), "losses": run(model, engine, optimizer, range(2, 4))}


def test_master_weights_resume(ranks: Launcher, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    saved = ranks(2)(save_halves, folder)[0]
    for world, stage in ((2, 3), (1, 0), (2, 1), (3, 2)):
        for found in ranks(world)(load_halves, folder, stage, torch.bfloat16):
            assert not unequal(found["picture"], saved["picture"]), (world, stage)
            if (world, stage) == (2, 3):
                assert found["losses"] == saved["losses"]


def test_master_weights_continue_in_float32(ranks: Launcher, tmp_path: Path) -> None:
    """An engine that computes in fp32 goes on from the fp32 masters, not from their rounded copies."""
    folder = str(tmp_path / "saved")
    saved = ranks(2)(save_halves, folder)[0]["picture"]
    for stage in (0, 3):
        for found in ranks(2)(load_halves, folder, stage, None):
            masters = {key.removeprefix("master "): value for key, value in saved.items() if key.startswith("master ")}
            trained = {name: value for name, value in masters.items() if f"0 {name} exp_avg" in saved}
            assert all(torch.equal(found["picture"][name], value) for name, value in trained.items()), stage


# ------------------------------------------------------------------------------------- several optimizers, units


def two_optimizers(folder: str, stage: int, load: bool) -> dict[str, Any]:
    model = net(seed=2 if load else 1)
    config = load_config(stage=stage, units={"classes": ["Block"]}, checkpoint={"max_file_bytes": 600})
    engine = ZeroEngine(model, config)
    blocks = torch.optim.SGD(model.blocks.parameters(), lr=0.1, momentum=0.9, foreach=False)
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
    others = torch.optim.Adagrad(rest, lr=0.1, foreach=False)
    engine.attach(blocks, others)
    if load:
        engine.load(Path(folder).parent)  # by `latest`
        return picture(engine)
    for step in range(2):
        model(torch.randn(2, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        blocks.step()
        others.step()
        engine.module.zero_grad()
    engine.save(folder)
    return picture(engine)


def test_several_optimizers_and_files(ranks: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "all" / "step-2"
    folder.parent.mkdir()
    saved = ranks(2)(two_optimizers, str(folder), 3, False)[0]
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    for world, stage in ((3, 1), (2, 3), (1, 0)):
        for found in ranks(world)(two_optimizers, str(folder), stage, True):
            assert not unequal(found, saved), (world, stage)


# ------------------------------------------------------------------------------------------------------- errors


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Other(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block() for _ in range(2))


def do_not_fit(folder: str) -> dict[str, str]:
    model, engine, optimizer = make(3)
    found = {}
    other = Other(5)
    engine_of_other = ZeroEngine(other, load_config(stage=3))
    engine_of_other.attach(torch.optim.AdamW(other.parameters()))
    found["model"] = message_of(lambda: engine_of_other.load(folder))

    wide = Transformer(width=24)
    found["shape"] = message_of(lambda: ZeroEngine(wide, load_config(stage=3)).load(folder))

    some = build("transformer", 3)
    engine_of_some = ZeroEngine(some, load_config(stage=2))
    half = list(some.parameters())
    engine_of_some.attach(torch.optim.AdamW(half[:4]), torch.optim.AdamW(half[4:]))
    found["count"] = message_of(lambda: engine_of_some.load(folder))

    ungrouped = build("transformer", 3)
    engine_of_ungrouped = ZeroEngine(ungrouped, load_config(stage=2))
    engine_of_ungrouped.attach(torch.optim.AdamW(ungrouped.parameters()))
    found["groups"] = message_of(lambda: engine_of_ungrouped.load(folder))
    found["nowhere"] = message_of(lambda: engine.load(folder + "-not-there"))
    engine.load_weights(folder)
    run(model, engine, optimizer, range(1))
    return found


def test_what_does_not_fit_is_named_on_all_ranks(ranks: Launcher, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    ranks(2)(train_and_save, folder, 3)
    for found in ranks(2)(do_not_fit, folder):
        assert "missing" in found["model"] and "stem.weight" in found["model"] and "embedding.weight" in found["model"]
        assert "embedding.weight" in found["shape"] and "(31, 20)" in found["shape"] and "(31, 24)" in found["shape"]
        assert "1 optimizer(s), 2 are attached" in found["count"]
        assert "param groups" in found["groups"]
        assert "saved-not-there" in found["nowhere"]


def halves(seed: int, groups: int) -> tuple[nn.Module, ZeroEngine, list[torch.optim.Optimizer]]:
    """Two optimizers, the second with so many groups, after a step."""
    model = build("transformer", seed)
    engine = ZeroEngine(model, load_config(stage=3, units={"min_numel": 0}))
    first, *rest = list(model.parameters())
    second = [{"params": rest}] if groups == 1 else [{"params": rest[:3]}, {"params": rest[3:]}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW([first]), torch.optim.AdamW(second)]
    engine.attach(*optimizers)
    loss_fn(model, make_batch("transformer", seed, ROWS)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return model, engine, optimizers


def refused_state(folder: str) -> list[list[str]]:
    """Names of what two loads have changed that were refused for the second optimizer."""
    halves(3, groups=1)[1].save(folder)
    _, engine, optimizers = halves(4, groups=2)
    changed = []
    for call in (engine.load, engine.load_optimizers):
        before = picture(engine)
        assert "param groups" in message_of(lambda call=call: call(folder))  # type: ignore[misc]
        changed.append(unequal(picture(engine), before))
    for optimizer in optimizers:
        optimizer.step()
    return changed


def test_a_load_whose_optimizer_state_is_refused_changes_nothing(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2)(refused_state, str(tmp_path / "saved")) == [[[], []]] * 2


def failing_saves(folder: str) -> dict[str, str]:
    """Rank 1 alone fails; an earlier checkpoint under the same name stays."""
    model, engine, optimizer = make(3)
    run(model, engine, optimizer, range(1))
    engine.save(folder)
    run(model, engine, optimizer, range(1, 2))
    found = {}
    rank = dist.get_rank()
    found["user"] = message_of(lambda: engine.save(folder, user={"bad": object()}))
    sharded = engine.optimizers[0]
    broken = next(iter(sharded.state.values())) if rank == 1 else None
    if broken is not None:
        broken["odd"] = torch.zeros(3, 3, 3)
    found["state"] = message_of(lambda: engine.save(folder))
    if broken is not None:
        del broken["odd"]
    other = "one" if rank == 0 else "two"
    found["names"] = message_of(lambda: engine.save(f"{folder}-{other}"))
    run(model, engine, optimizer, range(2, 3))
    return found


def test_a_failing_save_leaves_the_earlier_checkpoint(ranks: Launcher, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    results = ranks(2, timeout=90)(failing_saves, folder)
    for found in results:
        assert "no error" not in found.values(), found
        assert "odd" in found["state"]
        assert "-one" in found["names"] and "-two" in found["names"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "saved"]
    model = build("transformer", 1)
    engine = ZeroEngine(model, load_config(stage=0))
    engine.load_weights(folder)
    plain = build("transformer", 3)
    assert not torch.equal(model.state_dict()["embedding.weight"], plain.embedding.weight)
    assert Path(folder, "manifest.json").exists()
