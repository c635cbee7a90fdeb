"""Messages of the control plane, per rank and event, among 8 to 4,096 ranks of which one is real; and among real ones.

`docs/design/scale.md` has the figures.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.comm.forked import found_by_forks
from tests.device.control_plane import Arrives, Sent, sent_by

WORLDS = (8, 64, 512, 4096)
REPLICAS = 8
"""Ranks that shard among themselves, where there are replicas."""
SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "stage 3": {"stage": 3}, "HSDP": {"stage": 3}}
)
_OF_HUNDREDS = (8, 64, 512)
PLACES = ("first", "middle", "last")


@cache
def sent(name: str, world: int, place: str = "first", arrives: Arrives = "last") -> dict[str, Sent]:
    """Messages by event of one rank; each case runs once for all tests."""
    rank = {"first": 0, "middle": world // 2 - 1, "last": world - 1}[place]
    mesh = {"mesh": {"replicate": world // REPLICAS, "shard": REPLICAS}} if name == "HSDP" and world > REPLICAS else {}
    with tempfile.TemporaryDirectory() as folder:
        return sent_by(rank, world, Path(folder), arrives, **SETTINGS[name], **mesh)


def rounds(world: int) -> int:
    """Messages of a rank in which each gets a small value of each: straight among few ranks, by doubling among many."""
    return world - 1 if world <= 8 else math.ceil(math.log2(world))


CASES = [(name, world) for name in SETTINGS for world in _OF_HUNDREDS] + [("stage 3", 4096), ("HSDP", 4096)]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_messages_of_a_step_grow_as_the_logarithm_of_the_ranks(name: str, world: int) -> None:
    shard = REPLICAS if name == "HSDP" else world
    for event in ("first step", "step"):
        found = sent(name, world)[event]
        # Which parameters have gradients. The norm is one of the device's collectives.
        assert found.messages == rounds(world)
        assert len(found.peers) <= max(7, 2 * math.ceil(math.log2(world)))
        assert not found.store
        # Buckets go by the device's library, as often whatever the ranks are.
        kinds = {kind for kind, _ in found.collectives}
        assert kinds == {"all_gather", "reduce_scatter", "all_reduce"}
        norms = sum(count for (kind, size), count in found.collectives.items() if (kind, size) == ("all_reduce", shard))
        assert norms == 1 or shard == world // shard
        assert sum(found.collectives.values()) == sum(sent(name, 64)[event].collectives.values()) or world == 8


@pytest.mark.parametrize("name", ["stage 3", "HSDP"])
def test_the_host_does_as_much_for_messages_of_thousands_of_ranks_as_for_those_of_tens(name: str) -> None:
    few, many = (sent(name, world)["step"].operations for world in (64, 4096))
    # Each of twelve more rounds cuts its part out of a buffer; nothing is done for each rank.
    assert many - few <= 12 * 12


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("arrives", ["first", "last"])
def test_no_event_asks_the_store_more_often_among_more_ranks(place: str, arrives: Arrives) -> None:
    few, many = (sent("stage 3", world, place, arrives) for world in (64, 4096))
    assert few.keys() == many.keys() >= {"build", "step", "first save", "save", "barrier", "close"}
    for event, found in many.items():
        assert found.store == few[event].store, event
        assert found.keys <= 1, event


@pytest.mark.parametrize("place", PLACES)
def test_messages_of_building_and_saving_grow_as_the_logarithm_of_the_ranks(place: str) -> None:
    for world in WORLDS[1:]:
        found, log = sent("stage 3", world, place), math.ceil(math.log2(world))
        # Objects go in two gathers: their lengths, then themselves.
        assert {event: one.messages / log for event, one in found.items() if one.messages} == {
            "build": 4, "first step": 1, "step": 1, "first save": 5, "save": 3,
        }  # fmt: skip
        assert all(len(one.peers) <= 2 * log for one in found.values())


def test_building_among_replicas_makes_no_message_for_groups_of_others() -> None:
    few, many = (sent("HSDP", world)["build"] for world in (64, 4096))
    assert few.store == many.store
    assert sum(few.collectives.values()) == sum(many.collectives.values())


SCRIPT = Path(__file__).with_name("real_ranks.py")


@pytest.mark.parametrize("world", [2, 4, 8, 12])
def test_real_ranks_send_what_the_fake_ones_do(world: int, tmp_path: Path) -> None:
    real = found_by_forks(SCRIPT, world, tmp_path)
    for place, rank in (("first", 0), ("middle", world // 2 - 1), ("last", world - 1)):
        first, last = (sent("stage 3", world, place, arrives) for arrives in ("first", "last"))
        for event, found in real[rank].items():
            expected = last[event]
            assert found["messages"] == expected.messages, event
            assert found["peers"] == sorted(expected.peers), event
            known = sorted([kind, size, count] for (kind, size), count in expected.collectives.items())
            assert found["collectives"] == known, event
            # Every rank of a fake world is first, or last; real ones take turns. Gloo leaves the addresses of real
            # groups in a store of its own.
            addresses = 1 if event == "build" and world > 8 else 0
            for operation in ("set", "get", "add", "delete_key"):
                asked = found["store"].get(operation, 0) + (addresses if operation == "set" else 0)
                assert first[event].store[operation] <= asked <= last[event].store[operation], (event, operation)
