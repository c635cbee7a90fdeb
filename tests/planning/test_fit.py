"""True if a plan fits, and what is proposed when it does not: each proposal fits, and nothing smaller does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from zero_strategy.cli.plan_largest import largest_models
from zero_strategy.cli.plan_model import family_shape
from zero_strategy.config import load_config
from zero_strategy.offload.chunk_store import PAGE_BYTES
from zero_strategy.planning.buckets import Offload
from zero_strategy.planning.changes import changes_that_fit, kept_bytes, moved_bytes, notes, suggestions, with_resident
from zero_strategy.planning.gpt_shape import gpt_shape
from zero_strategy.planning.ledger import Ledger
from zero_strategy.planning.machine import Machine
from zero_strategy.planning.memory_plan import MemoryPlan
from zero_strategy.planning.model_shape import ModelShape
from zero_strategy.planning.room import Budget, fits, needs
from zero_strategy.runtime.terminal import size

GB = 10**9


LARGE, SMALL = gpt_shape(1536, 32, 32000), gpt_shape(1536, 6, 32000)
"""GPTs of 0.96e9 and 0.22e9 parameters."""


def plan(
    stage: int = 0, world: int = 4, device: str = "cuda", shape: ModelShape = LARGE, **options: object
) -> MemoryPlan:
    """Of a GPT."""
    defaults: dict[str, object] = {"compute_dtype": torch.bfloat16, "snapshots": False}
    return load_config(stage=stage).plan(shape, world_size=world, device=device, **(defaults | options))


def what(found: MemoryPlan, budget: Budget) -> list[tuple[str, ...]]:
    changes = changes_that_fit(found, budget)
    assert all(fits(change.plan, budget) for change in changes)
    return [change.what for change in changes]


def test_needs_are_per_rank_on_devices_and_per_host_elsewhere() -> None:
    budget = Budget(device=40 * GB, host=100 * GB, disk=None, margin=0.1)
    found = plan(stage=0, snapshots=True)
    ledger = found.ledger()
    device, host = needs(found, budget)
    assert (device.needed, device.there) == (ledger.tier_bytes("device"), 36 * GB)
    assert (host.needed, host.there) == (4 * ledger.tier_bytes("host"), 90 * GB)
    assert fits(found, budget)


def test_a_cpu_run_takes_all_of_it_from_the_host() -> None:
    found = plan(stage=3, device="cpu")
    (host,) = needs(found, Budget(host=GB))
    assert host.needed == 4 * found.ledger().total.taken and not host.fits


def test_what_is_not_known_fits() -> None:
    assert fits(plan(), Budget())


def test_parameters_that_are_kept_are_released_first() -> None:
    kept = plan(stage=3).changed(settings={"reshard_after_backward": False})
    budget = Budget(device=int(plan(stage=3).ledger().tier_bytes("device") / 0.95) + GB // 10, host=100 * GB)
    assert not fits(kept, budget)
    assert what(kept, budget)[0] == ("reshard_after_backward: true",)
    below = plan(stage=2).changed(settings={"reshard_after_backward": False})
    assert ("stage: 3", "reshard_after_backward: true") in what(below, budget)


def test_a_stage_is_the_smallest_change() -> None:
    budget = Budget(device=int(plan(stage=2).ledger().tier_bytes("device") / 0.95) + GB // 10, host=100 * GB)
    now = plan(stage=0)
    assert not fits(now, budget)
    assert what(now, budget)[0] == ("stage: 1",)
    now = plan(stage=0, accumulation=2)  # then stage 1 keeps full gradients
    assert not fits(now, budget) and not fits(plan(stage=1, accumulation=2), budget)
    assert what(now, budget)[0] == ("stage: 2",)


def test_whole_gradients_of_the_config_are_given_up_before_parameters() -> None:
    now = load_config(stage=2, gradient_reduction="per_step").plan(
        gpt_shape(1536, 32, 32000),
        world_size=4,
        device="cuda",
        compute_dtype=torch.bfloat16,
        snapshots=False,
        accumulation=2,
    )
    budget = Budget(device=int(plan(stage=2).ledger().tier_bytes("device") / 0.95) + GB // 10, host=100 * GB)
    assert not fits(now, budget)
    assert what(now, budget)[0] == ("gradient_reduction: per_micro_batch",)


def test_devices_that_are_there_come_before_offload() -> None:
    budget = Budget(device=6 * GB, host=100 * GB, gpus=8)
    found = what(plan(stage=3, world=2), budget)
    assert found[0] == ("ranks: 4 (4 per host)",)
    assert ("offload.optimizer: cpu",) in found


def test_offload_to_the_host_then_to_drives_then_further_hosts() -> None:
    now = plan(stage=3, world=1)
    host = Budget(device=8 * GB, host=40 * GB, disk=100 * GB)
    assert what(now, host) == [
        ("offload.optimizer: cpu",), ("offload.optimizer: nvme",), ("ranks: 4 (1 per host)",)
    ]  # fmt: skip
    small = replace(host, host=6 * GB)
    assert what(now, small)[0] == ("offload.optimizer: nvme",)
    assert what(now, replace(small, disk=None)) == [("ranks: 4 (1 per host)",)]


def test_snapshots_are_given_up_first() -> None:
    budget = Budget(device=100 * GB, host=5 * GB)
    assert what(plan(stage=3, world=1, snapshots=True), budget)[0] == ("checkpoint.asynchronous: false",)


def test_a_mesh_that_was_set_does_not_stand_in_the_way_of_more_ranks() -> None:
    now = load_config(stage=3, mesh={"shard": 2, "replicate": 2}).plan(
        gpt_shape(1536, 32, 32000), world_size=4, device="cuda", compute_dtype=torch.bfloat16, snapshots=False
    )
    assert what(now, Budget(device=8 * GB, host=100 * GB, gpus=4))[-1] == ("ranks: 8 (4 per host)",)


def test_on_the_cpu_offload_to_the_host_is_no_change() -> None:
    found = what(plan(stage=0, world=1, device="cpu"), Budget(host=12 * GB, disk=100 * GB))
    assert found and not any("cpu" in part for change in found for part in change)


def test_nothing_helps_a_unit_that_is_too_large() -> None:
    assert what(plan(stage=3), Budget(device=GB // 10, host=100 * GB, disk=1000 * GB)) == []


def test_bytes_of_offload_are_those_of_the_design() -> None:
    """16 bytes per parameter on the host with the CPU, none but fixed staging with drives; nothing is lost.

    Beside the elements there are what is left of last pages, and four bytes of step count per tensor.
    """

    def rooms(ledger: Ledger) -> int:
        """Through which gradients and weights pass: a fixed number of chunks, whatever the size of the model."""
        found = ledger.only(category="staging", tier="host").total.taken
        assert 0 < found <= 4 * 4 * Offload().chunk_numel
        return found

    count = plan().model.parameters
    for world in (1, 4):
        cpu = plan(2, world, offload=Offload(optimizer="cpu")).ledger()
        assert 15.999 < world * (cpu.tier_bytes("host") - rooms(cpu)) / count < 16.001
        kept = plan(2, world, offload=Offload(optimizer="cpu", gradients="none")).ledger()
        assert 11.999 < world * (kept.tier_bytes("host") - rooms(kept)) / count < 12.001
        assert cpu.held().only(tier="device", category="optimizer state").total.taken == 0
        offload = Offload(optimizer="nvme")
        nvme = plan(2, world, offload=offload).ledger()
        staging = nvme.only(category="staging", tier="host").total.taken
        assert 0 < staging <= offload.staging_bytes
        assert world * (nvme.tier_bytes("host") - staging) / count < 0.01
        assert 15.99 < world * nvme.tier_bytes("nvme") / count < 16.01
        in_memory = plan(2, world, offload=Offload(optimizer="nvme", gradients="cpu")).ledger()
        staging = in_memory.only(category="staging", tier="host").total.taken
        assert 3.99 < world * (in_memory.tier_bytes("host") - staging) / count < 4.01


def test_offload_of_parameters_needs_stage_3() -> None:
    with pytest.raises(ValueError, match=r"offload.parameters is 'cpu' at stage 2; it needs stage 3"):
        plan(2, offload=Offload(optimizer="cpu", parameters="cpu"))


IN_FILES = Offload(optimizer="nvme", parameters="nvme")


def resident(nbytes: int, **options: object) -> MemoryPlan:
    return plan(3, 1, shape=SMALL, offload=replace(IN_FILES, resident_bytes=nbytes), **options)


def in_files(found: MemoryPlan, category: str) -> int:
    return found.ledger().only(tier="nvme", category=category).total.taken


def room_for(found: MemoryPlan, more: int = 0) -> Budget:
    """Host memory that is just enough."""
    return Budget(device=100 * GB, host=found.ledger().tier_bytes("host") + more, disk=100 * GB, margin=0.0)


def test_less_that_stays_is_proposed_first_and_as_much_as_fits() -> None:
    now, enough = resident(GB), resident(GB // 5)
    budget = room_for(enough)
    assert not fits(now, budget) and suggestions(now, budget) == []
    first = changes_that_fit(now, budget)[0]
    ((name, value),) = [each.split(": ") for each in first.what]
    assert name == "offload.resident_bytes" and first.plan.offload.resident_bytes == int(value)
    assert fits(first.plan, budget) and int(value) >= kept_bytes(enough) > 0.19 * GB
    largest = with_resident(now, int(value) + 2 * enough.offload.chunk_numel * 2 + PAGE_BYTES)
    assert not fits(largest, budget)
    assert first.what not in what(now, replace(budget, host=GB // 20))


def test_nothing_stays_of_what_is_not_in_files() -> None:
    now = plan(3, 1, offload=Offload(optimizer="cpu", resident_bytes=GB))
    found = what(now, Budget(device=100 * GB, host=GB))
    assert not any("resident_bytes" in part for change in found for part in change)
    assert suggestions(now, Budget(device=100 * GB, host=100 * GB)) == []


def test_room_that_is_left_is_suggested_for_what_is_in_files() -> None:
    for now in (resident(0), resident(GB // 5), plan(2, 2, shape=SMALL, offload=Offload(optimizer="nvme"))):
        budget = room_for(now, int(0.15 * GB))
        if now.ranks_per_host > 1:
            budget = replace(budget, host=now.ranks_per_host * (budget.host or 0))
        (said,) = suggestions(now, budget)
        found = re.fullmatch(r"offload.resident_bytes could be (\d+): saves (.*) read and written per step", said)
        assert found is not None
        then = with_resident(now, int(found[1]))
        assert fits(then, budget) and kept_bytes(then) == int(found[1]) > kept_bytes(now)
        parameters, gradients = (in_files(now, each) - in_files(then, each) for each in ("parameters", "gradients"))
        saved = moved_bytes(now) - moved_bytes(then)
        assert saved == pytest.approx(4 * parameters + 2 * gradients, rel=1e-3)
        assert saved > 0 and found[2] == size(saved)
        largest = with_resident(now, int(found[1]) + 2 * now.offload.chunk_numel * 4 + PAGE_BYTES)
        assert not fits(largest, budget)
    assert suggestions(resident(0), room_for(resident(0))) == []
    assert suggestions(resident(0), replace(budget, host=None)) == []
    everything = resident(100 * GB)
    assert moved_bytes(everything) == 0 and in_files(everything, "parameters") == 0
    assert suggestions(everything, Budget(device=100 * GB, host=100 * GB)) == []


def test_notes_name_the_limit_and_the_way_out() -> None:
    found = plan(3, offload=Offload(optimizer="nvme"))
    said = " ".join(notes(found, Machine(memlock=2**23, shm_free=2**26)))
    assert "ulimit -l" in said and "--shm-size" in said and "--nvme-path" in said
    assert notes(plan(3), Machine(memlock=None, shm_free=2**34)) == []


def test_the_largest_model_fits_and_the_next_does_not() -> None:
    # So little that models are small and soon planned; either the device or the host is the limit.
    base, budget = plan(0, world=2), Budget(device=2 * GB, host=4 * GB, disk=40 * GB)
    models = list(largest_models(base, budget, lambda step: family_shape(step, 50304)))
    assert {entry.stage for entry in models} == {0, 1, 2, 3}
    sizes = {}
    for entry in models:
        assert entry.plan is not None and fits(entry.plan, budget)
        step = entry.plan.model.units[0].parameters[0][1].shape[1] // 64
        assert not fits(replace(entry.plan, model=family_shape(step + 1, 50304)), budget)
        sizes[entry.stage, entry.offload.describe()] = entry.plan.model.parameters
    assert sizes[1, "none"] >= sizes[0, "none"] and sizes[3, "none"] >= sizes[2, "none"]
    assert sizes[3, "optimizer nvme, parameters nvme"] >= sizes[3, "none"]
    without = list(largest_models(base, replace(budget, disk=None), lambda step: family_shape(step, 50304)))
    assert all("nvme" not in entry.offload.describe() for entry in without)
