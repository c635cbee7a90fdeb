"""Copies in memory: the newest that is whole is taken, and nothing that was damaged, torn or mixed up."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.survive.buddies import pairs
from zero_strategy.survive.copies import MemoryCopies
from zero_strategy.survive.membership import Member, World
from zero_strategy.watchdog.peers import own_card


def world_of(ranks: int, hosts: int = 1) -> World:
    """Ranks of this host, which take themselves for those of several if need be."""
    each = ranks // hosts
    members = [
        Member(f"{rank:06d}:x", own_card()._replace(host=f"host{rank // each}"), "127.0.0.1", 1, "", 1)
        for rank in range(ranks)
    ]
    return World(1, dist.get_rank(), members)


def training(stage: int, stages: int = 1) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
    model = layers if stages == 1 else PipelineModule(layers, stages, loss_fn=mean_square)
    engine = (ZeroEngine if stages == 1 else PipelineEngine)(model, {"stage": stage})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    return engine, optimizer


def mean_square(outputs: Tensor, labels: None) -> Tensor:
    return outputs.square().mean()


def step(engine: ZeroEngine, optimizer: torch.optim.Optimizer, number: int) -> dict[str, Tensor]:
    """The weights after it."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
    if isinstance(engine, PipelineEngine):
        engine.forward_backward([(x, None)] * 2, 2)
    else:
        engine.module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return engine.full_state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def damaged(folder: str, stage: int, how: str, rounds: int, stages: int = 1) -> list[str]:
    """Damage of the newest copy, again and again; each time the one before comes back."""
    chosen, wrong = random.Random(stage), []
    engine, optimizer = training(stage, stages)
    copies = MemoryCopies(Path(folder))
    world = world_of(dist.get_world_size())
    for number in range(rounds):
        before = step(engine, optimizer, 2 * number)
        copies.take(engine, world, {"number": 2 * number})
        step(engine, optimizer, 2 * number + 1)
        copies.take(engine, world, {"number": 2 * number + 1})
        engine.mesh.world_group.barrier.wait_for_all("written")
        if world.rank == 0:
            damage(Path(folder) / str(copies.turn % 2), Path(folder) / str((copies.turn + 1) % 2), how, chosen)
        engine.mesh.world_group.barrier.wait_for_all("damaged")
        found = copies.restore(engine)
        if found != {"number": 2 * number} or not same(engine.full_state_dict(), before):
            wrong.append(f"round {number}: {found}")
    engine.close()
    return wrong


def damage(newest: Path, older: Path, how: str, chosen: random.Random) -> None:
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    if how == "manifest":
        (newest / "manifest.json").unlink()
    elif how == "missing":
        chosen.choice([file for file in files if file.suffix == ".safetensors"]).unlink()
    elif how == "cut":
        file = chosen.choice([file for file in files if file.suffix == ".safetensors"])
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "stale":
        file = chosen.choice([file for file in files if file.suffix == ".safetensors"])
        shutil.copy(next(older.rglob(file.name)), file)


@pytest.mark.parametrize("how", ["manifest", "missing", "cut", "stale"])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_not_whole_is_not_used(ranks: Launcher, tmp_path: Path, stage: int, how: str) -> None:
    for wrong in ranks(2)(damaged, str(tmp_path / "copies"), stage, how, 2):
        assert not wrong


@pytest.mark.parametrize("how", ["manifest", "cut", "stale"])
def test_what_is_not_whole_of_a_pipeline_is_not_used(ranks: Launcher, tmp_path: Path, how: str) -> None:
    """Of whichever stage and copy."""
    for wrong in ranks(4)(damaged, str(tmp_path / "copies"), 1, how, 2, 2):
        assert not wrong


def flipped(folder: str, count: int, stages: int) -> list[str]:
    """Bits of the newest copy, one flipped at a time; each time the one before comes back."""
    chosen, wrong = random.Random(0), []
    engine, optimizer = training(2, stages)
    copies, world = MemoryCopies(Path(folder)), world_of(dist.get_world_size())
    before = step(engine, optimizer, 0)
    copies.take(engine, world, {"number": 0})
    step(engine, optimizer, 1)
    copies.take(engine, world, {"number": 1})
    newest = Path(folder) / str(copies.turn % 2)
    for _ in range(count):
        kept: tuple[Path, bytes] | None = None
        if world.rank == 0:
            kept = flip(newest, chosen)
        engine.mesh.world_group.barrier.wait_for_all("flipped")
        if (found := copies.restore(engine)) != {"number": 0} or not same(engine.full_state_dict(), before):
            wrong.append(f"{kept and kept[0]}: {found}")
        engine.mesh.world_group.barrier.wait_for_all("looked")
        if kept is not None:
            kept[0].write_bytes(kept[1])
    engine.mesh.world_group.barrier.wait_for_all("as before")
    if copies.restore(engine) != {"number": 1}:
        wrong.append("the copy without a flip")
    engine.close()
    return wrong


def flip(directory: Path, chosen: random.Random) -> tuple[Path, bytes]:
    """Flip a bit of a file that is read; returns the file, and what was in it."""
    file = chosen.choice(sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size))
    content = file.read_bytes()
    # The header of slices is for other programs: nothing here reads it.
    first = 8 + int.from_bytes(content[:8], "little") if file.suffix == ".safetensors" else 0
    changed = bytearray(content)
    changed[chosen.randrange(first, len(content))] ^= 1 << chosen.randrange(8)
    file.write_bytes(bytes(changed))
    return file, content


@pytest.mark.parametrize("stages, count", [(1, 100), (2, 20)])
def test_flipped_bits_are_found(ranks: Launcher, tmp_path: Path, stages: int, count: int) -> None:
    for wrong in ranks(2, timeout=120)(flipped, str(tmp_path / "copies"), count, stages):
        assert not wrong


def resized(folder: str, write: bool) -> Any:
    engine, optimizer = training(3)
    copies = MemoryCopies(Path(folder))
    if write:
        for number in range(3):
            state = step(engine, optimizer, number)
            copies.take(engine, world_of(dist.get_world_size()), {"number": number})
    else:
        assert copies.restore(engine) == {"number": 2}
        state = engine.full_state_dict()
    engine.close()
    return {name: value.tolist() for name, value in state.items()}


def test_any_number_of_ranks_reads_a_copy(ranks: Launcher, tmp_path: Path) -> None:
    written = ranks(3)(resized, str(tmp_path / "copies"), True)[0]
    for world in (1, 2):
        assert ranks(world)(resized, str(tmp_path / "copies"), False)[0] == written


def no_copy(folder: str) -> Any:
    engine, _ = training(1)
    return MemoryCopies(Path(folder)).restore(engine)


def test_without_a_copy_nothing_is_restored(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2)(no_copy, str(tmp_path / "copies")) == [None, None]


def host_lost(folder: str) -> list[str]:
    """Four ranks of two hosts; then two ranks that have the first host's memory alone."""
    engine, optimizer = training(3)
    rank = dist.get_rank()
    copies = MemoryCopies(Path(folder) / f"host{rank // 2}")
    for number in range(4):
        state = step(engine, optimizer, number)
        copies.take(engine, world_of(4, hosts=2), {"number": number})
    copies._buddies_of(world_of(4, hosts=2)).wait()
    engine.mesh.world_group.barrier.wait_for_all("all have travelled")
    again, _ = training(3)
    found = MemoryCopies(Path(folder) / "host1").restore(again)
    wrong = [] if found == {"number": 3} else [f"{found}"]
    if not same(again.full_state_dict(), state):
        wrong.append("weights")
    return wrong


def test_a_host_has_the_copies_of_the_one_before(ranks: Launcher, tmp_path: Path) -> None:
    for wrong in ranks(4)(host_lost, str(tmp_path)):
        assert not wrong


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([[0, 1, 2]], []),
        ([[0, 1], [2, 3]], [(0, 2), (1, 3), (2, 0), (3, 1)]),
        ([[0], [1, 2], [3]], [(0, 1), (1, 3), (2, 3), (3, 0)]),
    ],
)
def test_each_rank_has_a_buddy_on_another_host(hosts: list[list[int]], expected: list[tuple[int, int]]) -> None:
    assert pairs(hosts) == expected


def held(folder: str, stage: int, hosts: int) -> tuple[int, int]:
    """Bytes of copies by the plan and by the ledger."""
    engine, optimizer = training(stage)
    world = world_of(dist.get_world_size(), hosts)
    copies = MemoryCopies(Path(folder) / f"host{world.rank * hosts // world.size}")
    for number in range(3):
        step(engine, optimizer, number)
        copies.take(engine, world, {"number": number})
        copies._buddies_of(world).wait()
    engine.mesh.world_group.barrier.wait_for_all("all have travelled")
    copies.take(engine, world, {"number": 3})
    config = load_config(stage=stage, survive=True)
    plan = config.plan(engine.module, world_size=world.size, ranks_per_host=world.size // hosts)
    planned = plan.ledger(world.rank).only(category="copies").total.asked
    found = engine.ledger().only(category="copies").total.asked
    engine.close()
    return planned, found


@pytest.mark.parametrize(("world", "hosts"), [(2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("stage", [1, 3])
def test_memory_is_as_planned(ranks: Launcher, tmp_path: Path, stage: int, world: int, hosts: int) -> None:
    for planned, found in ranks(world)(held, str(tmp_path), stage, hosts):
        assert planned == found > 0
