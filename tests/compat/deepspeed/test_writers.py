"""Writers of slices: every slice is written once, by as many ranks as the unit says; and DeepSpeed decides the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_strategy.compat.deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import (
    CHECKPOINT_DATA_PARALLEL_UNITS,
    DataParallelWriterFactory,
    ExpertParallelInfo,
    MPUInfo,
    UniversalParallelInfo,
)

UNITS = [None, *CHECKPOINT_DATA_PARALLEL_UNITS]
SIZES = st.sampled_from([1, 2, 4])


def places(machines: int, per_machine: int, pp: int, tp: int) -> list[UniversalParallelInfo]:
    """All ranks of a job: tensor ranks are neighbours, then data ranks, then stages."""
    world = machines * per_machine
    dp = world // (pp * tp)
    infos = []
    for rank in range(world):
        stage, rest = divmod(rank, dp * tp)
        data, tensor = divmod(rest, tp)
        peers = [(stage * dp + d) * tp + tensor for d in range(dp)]
        mpu = None if pp * tp == 1 else MPUInfo(pp, stage, tp, tensor, dp, peers, data)
        infos.append(
            UniversalParallelInfo(
                world, rank, rank % per_machine, mpu, None, pp * tp == 1, machines, rank // per_machine, 2 * machines
            )
        )
    return infos


def expert_places(machines: int, per_machine: int, ep: int) -> list[UniversalParallelInfo]:
    infos = places(machines, per_machine, 1, 1)
    for info in infos:
        world = info.global_world_size
        peers = list(range(info.global_rank % ep, world, ep))
        info.ep_info = ExpertParallelInfo(ep, info.global_rank % ep, world // ep, peers, info.global_rank // ep)
    return infos


def slice_of(info: UniversalParallelInfo) -> tuple[int, int]:
    return (0, 0) if info.mpu_info is None else (info.mpu_info.pp_rank, info.mpu_info.tp_rank)


@given(machines=SIZES, per_machine=st.sampled_from([2, 4, 8]), pp=SIZES, tp=SIZES, unit=st.sampled_from(UNITS))
def test_each_slice_is_written_once(machines: int, per_machine: int, pp: int, tp: int, unit: Any) -> None:
    if (machines * per_machine) % (pp * tp):
        return
    writers: dict[tuple[int, int], list[Any]] = {}
    for info in places(machines, per_machine, pp, tp):
        try:
            config = DataParallelWriterFactory(info, unit).create_config(0)
        except ValueError:
            return  # machines or sockets that cannot be divided evenly
        if config is not None:
            assert config.global_rank == info.global_rank
            writers.setdefault(slice_of(info), []).append(config)
    assert len(writers) == pp * tp
    for configs in writers.values():
        assert sorted(config.rank for config in configs) == list(range(configs[0].world_size))
        assert {config.world_size for config in configs} == {len(configs)}


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (None, {0: (1, 0)}),
        ("REPLICA", {rank: (8, rank) for rank in range(8)}),
        ("SOCKET", {0: (4, 0), 2: (4, 1), 4: (4, 2), 6: (4, 3)}),
        ("MACHINE", {0: (2, 0), 4: (2, 1)}),
    ],
)
def test_ddp_on_two_machines_of_four(unit: Any, expected: dict[int, tuple[int, int]]) -> None:
    made = [DataParallelWriterFactory(info, unit).create_config(0) for info in places(2, 4, 1, 1)]
    assert {c.global_rank: (c.world_size, c.rank) for c in made if c is not None} == expected


def test_under_zero_every_rank_writes_and_at_stage_3_its_own() -> None:
    for info in places(2, 4, 1, 1):
        factory = DataParallelWriterFactory(info, "MACHINE")
        first = info.global_rank % 4 == 0
        config = factory.create_config(1)
        assert config is not None and config.world_size == (2 if first else 1)
        own = factory.create_config(3)
        assert own is not None and (own.world_size, own.rank) == (1, 0)


@given(machines=SIZES, per_machine=st.sampled_from([2, 4]), ep=SIZES, unit=st.sampled_from(UNITS))
def test_each_expert_is_written_once(machines: int, per_machine: int, ep: int, unit: Any) -> None:
    if (machines * per_machine) % ep:
        return
    writers: dict[int, list[Any]] = {}
    for info in expert_places(machines, per_machine, ep):
        try:
            config = DataParallelWriterFactory(info, unit).create_config(0, has_moe_layers=True)
        except ValueError:
            return
        if config is not None:
            writers.setdefault(info.global_rank % ep, []).append(config)
    if unit in (None, "REPLICA"):
        assert len(writers) == ep
    for configs in writers.values():
        assert sorted(config.rank for config in configs) == list(range(configs[0].world_size))


def test_what_cannot_be_decided_is_refused() -> None:
    info = places(1, 4, 1, 2)[0]
    with pytest.raises(ValueError, match="writer unit 'RACK'"):
        DataParallelWriterFactory(info, "RACK")
    with pytest.raises(ValueError, match="ep_info is None"):
        DataParallelWriterFactory(info, None).create_config(0, True)
    info.ep_info = ExpertParallelInfo(2, 0, 2, [0, 2], 0)
    with pytest.raises(NotImplementedError, match="together with tensor or pipeline"):
        DataParallelWriterFactory(info, "MACHINE").create_config(0, True)
    info.mpu_info = None
    with pytest.raises(ValueError, match="mpu_info is None"):
        DataParallelWriterFactory(info, "MACHINE").create_config(0)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 2)])
@pytest.mark.parametrize(("machines", "per_machine"), [(1, 8), (2, 4), (4, 4)])
def test_deepspeed_decides_the_same(machines: int, per_machine: int, pp: int, tp: int, unit: Any) -> None:
    theirs = pytest.importorskip("deepspeed.runtime.model_checkpointing.data_parallel_writer_factory")
    for info in places(machines, per_machine, pp, tp):
        if info.mpu_info is None and unit is None:
            continue  # theirs asks for an attribute that does not exist
        for stage in (0, 1, 3):
            try:
                expected = theirs.DataParallelWriterFactory(info, unit).create_config(stage, False)
            except AssertionError:
                with pytest.raises(ValueError, match="cannot"):
                    DataParallelWriterFactory(info, unit).create_config(stage)
                continue
            made = DataParallelWriterFactory(info, unit).create_config(stage)
            assert (made is None) == (expected is None)
            if made is None or expected is None:
                continue
            if expected.rank >= expected.world_size:
                expected.rank = made.rank  # theirs counts sockets between writers, and so beyond the writers
            assert vars(made) == vars(expected)
