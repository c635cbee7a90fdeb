"""`schedule: auto`: the fastest that fits, by simulation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from zero_strategy.pipeline.engine_setup import LayerCost, choose_schedule, predictions

LAYERS = [LayerCost(1.0, 1.0, 1.0, activation_bytes=100.0)] * 8


def equally(parts: int) -> Sequence[int]:
    return [part * len(LAYERS) // parts for part in range(parts + 1)]


def test_predictions_follow_the_laws() -> None:
    found = {(one.schedule, one.chunks): one for one in predictions(4, 8, LAYERS, equally)}
    assert set(found) == {
        ("gpipe", 1),
        ("gpipe", 2),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("zb_h1", 1),
        ("interleaved_zb", 2),
        ("zbv", 2),
    }
    assert found["1f1b", 1].makespan == 2 * 33 and found["1f1b", 1].idle == pytest.approx(3 / 11)
    assert found["1f1b", 1].activation_bytes == (800, 600, 400, 200)
    assert found["gpipe", 1].activation_bytes == (1600,) * 4
    assert found["zbv", 2].activation_bytes == (800,) * 4
    assert found["zbv", 2].makespan == 51


def test_the_fastest_is_taken() -> None:
    choice = choose_schedule(4, 8, LAYERS, equally)
    assert choice.makespan == min(one.makespan for one in predictions(4, 8, LAYERS, equally)) == 51
    assert (choice.schedule, choice.chunks) == ("interleaved_zb", 2)  # ZB-V is as fast and holds as much


def test_what_does_not_fit_is_not_taken() -> None:
    assert choose_schedule(4, 8, LAYERS, equally, 800).makespan == 51
    # Only 1F1B holds less than the rest on the ranks after the first.
    assert choose_schedule(4, 8, LAYERS, equally, [800, 600, 400, 200]).schedule == "1f1b"
    with pytest.raises(ValueError, match="fit into 700 bytes per rank; 1f1b needs least: 800, 600, 400, 200"):
        choose_schedule(4, 8, LAYERS, equally, 700)


def test_chunks_that_are_settled() -> None:
    assert choose_schedule(4, 8, LAYERS, equally, chunks=1).schedule == "zb_h1"
    assert choose_schedule(2, 8, LAYERS, equally, chunks=3).chunks == 3
    with pytest.raises(ValueError, match="3 chunks per rank: there are 8 layers for 4 x 3 stages"):
        choose_schedule(4, 8, LAYERS, equally, chunks=3)


def test_splitting_that_costs_too_much_is_not_taken() -> None:
    dear = [LayerCost(1.0, 2.0, 2.0, whole=2.0, activation_bytes=1.0)] * 8
    assert choose_schedule(4, 8, dear, equally).schedule == "interleaved_1f1b"


def test_messages_that_take_long_speak_against_chunks() -> None:
    assert choose_schedule(4, 8, LAYERS, equally, latency=0.0).chunks == 2
    assert choose_schedule(4, 8, LAYERS, equally, latency=3.0).chunks == 1


def test_equally_fast_ones_that_hold_less() -> None:
    assert choose_schedule(1, 8, LAYERS, equally).schedule == "1f1b"  # nothing to gain with one rank
    whole = [LayerCost(1.0, 1.0, 1.0, whole=2.0, activation_bytes=1.0)] * 4
    assert choose_schedule(4, 8, whole, lambda parts: range(parts + 1)).chunks == 1


@pytest.mark.parametrize(
    ("stages", "memory", "message"),
    [(9, None, "8 layers cannot be divided among 9"), (4, [1.0, 2.0], "2 numbers for 4 ranks")],
)
def test_choice_mistakes(stages: int, memory: list[float] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_schedule(stages, 8, LAYERS, equally, memory)
