"""Replicas are compared where there are any: full parameters, and at stage 3 slices over the replicate axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.engine.nets import net
from tests.launcher import Launcher
from zero_strategy.compat.megatron.diagnostics import check_param_hashes_across_dp_replicas as check
from zero_strategy.compat.megatron.diagnostics import replica_report
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

CASES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "replicas": {"stage": 3, "mesh": {"replicate": 2}},
    "replicas in host memory": {
        "stage": 3,
        "mesh": {"replicate": 2},
        "offload": {"optimizer": "cpu", "parameters": "cpu"},
    },
}


@torch.no_grad()
def looked_at(changed_on: int) -> dict[str, Any]:
    found = {}
    for key, config in CASES.items():
        model = net()
        model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
        engine = None if config is None else ZeroEngine(model, load_config(units={"min_numel": 0}, **config))
        before = check(model), check(model, True), str(replica_report(model))
        if dist.get_rank() == changed_on:
            if engine is None or engine.stage < 3:
                model.blocks[1].down.weight.data[2, 3] += 1e-7
            else:
                place = engine.model.place(model.blocks[1].down.weight)  # type: ignore[arg-type]
                assert place is not None
                piece = place[0].piece_of.get(place[1])
                if piece is not None:
                    place[0].shard.write(piece.offset, place[0].shard.read(piece.offset, piece.offset + 1) + 1e-3)
        found[key] = *before, check([model]), check([model], cross_check=True), str(replica_report([model]))
    return found


def test_replica_check_two_ranks(ranks: Launcher) -> None:
    parameters = 3 * 6 + 6
    for changed in (0, 1):
        both = ranks(2)(looked_at, changed)
        for rank, found in enumerate(both):
            for key, (first, everyone, text, first_after, everyone_after, text_after) in found.items():
                compared = 0 if key == "stage 3" else parameters - (1 if "replicas" in key else 0)
                assert first and everyone and text == f"replicas are equal ({compared} compared)", key
                assert text_after == both[0][key][-1], "the same report on every rank"
                if key == "stage 3":  # nobody holds what another one holds
                    assert first_after and everyone_after
                    continue
                assert not everyone_after and "blocks.1.down.weight: rank(s) 1 of 0 | 1" in text_after, text_after
                assert text_after.count("\n") == 1
                assert first_after == (rank == 0)


def test_one_process_and_other_modules() -> None:
    model = net()
    assert check(model) and check([model, nn.Linear(2, 2)], True)
    assert replica_report(model).compared == 0
