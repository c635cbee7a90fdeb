"""Of the candidates that fit the quickest is chosen, and what nobody has set is all that is chosen."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPTSize, loss_fn
from zero_strategy.auto.candidates import CHOSEN, batches_of, candidates
from zero_strategy.auto.choice import Choice, NothingFitsError, choose
from zero_strategy.auto.decide import micro_batches, without_auto
from zero_strategy.auto.example import Example
from zero_strategy.auto.foreseen import MicroBatch
from zero_strategy.auto.recomputation import Recomputation
from zero_strategy.auto.roof import Roof
from zero_strategy.config import AutoConfig, ZeroConfig, load_config
from zero_strategy.planning.memory_plan import MemoryPlan, plan_model
from zero_strategy.planning.room import Budget

SIZE, LENGTH = GPTSize(width=64, depth=3, heads=2, vocabulary=512), 32
ROOF = Roof(flops=5e10, memory=1e10, begin=2e-6, link=3e9, write=1e9, read=2e9)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return loss_fn(model(batch), batch)


EXAMPLE = Example(torch.zeros(2, LENGTH, dtype=torch.long), loss)


def plan_of(asked: ZeroConfig, ranks: int, **options: Any) -> MemoryPlan:
    return plan_model(GPT(SIZE, LENGTH), without_auto(asked), world_size=ranks, device="cpu", **options)


def choice_of(asked: ZeroConfig, ranks: int, host: int | None, example: Example | None = EXAMPLE) -> Choice:
    budget = Budget(host=host, disk=1 << 40, margin=asked.auto.margin)
    plan = plan_of(asked, ranks)
    batches, unknown = micro_batches(asked, plan, GPT(SIZE, LENGTH), example)
    return choose(asked, plan, budget, ROOF, batches, rows=0 if example is None else example.rows, unknown=unknown)


@pytest.mark.parametrize("seed", range(12))
def test_the_quickest_that_fits_is_chosen(seed: int) -> None:
    """The oracle plans the config file that is printed, from nothing, and foresees its micro-batch itself."""
    draw = random.Random(seed)
    ranks, margin = draw.choice([1, 2, 4]), draw.choice([0.0, 0.1, 0.3])
    drive = {"offload": {"nvme_path": ["/drive"]}} if draw.random() < 0.5 else {}
    asked = load_config(stage="auto", auto={"global_batch": 16, "margin": margin}, **drive)
    host = draw.randrange(1_500_000, 14_000_000) * ranks
    try:
        found = choice_of(asked, ranks, host)
    except NothingFitsError:
        least = min(each.excess for each in considered_anew(asked, ranks, host))
        assert least > 1
        return
    candidate = found.chosen.candidate
    settings = load_config(yaml_of(found))
    plan = plan_of(settings, ranks, accumulation=candidate.accumulation)
    units = [f"blocks.{number}" for number in range(SIZE.depth)]
    batch = EXAMPLE.of_rows(candidate.rows).batch
    peak = Recomputation.of(settings).foresee(MicroBatch(GPT(SIZE, LENGTH), batch, loss, units)).peak
    gaps = 0 if settings.mmap_threshold else 0.3 * peak  # of the heap, at least
    ledger = plan.ledger()
    peaks = ledger.peaks().only(tier="device").total.taken
    held = ledger.tier_bytes("device") + ledger.tier_bytes("host") - peaks
    needed = held + max(peaks, peak) + gaps  # gradients of tied weights come when activations are gone
    assert needed * ranks <= host * (1 - margin) * 1.01  # rows lie on a line
    assert candidate.rows * candidate.accumulation * ranks == 16
    quickest = min(each.seconds.total for each in considered_anew(asked, ranks, host) if each.fits)
    assert found.chosen.seconds.total <= 1.01 * quickest


def yaml_of(found: Choice) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped, unused-ignore]

    made: dict[str, Any] = yaml.safe_load(found.pinned_yaml())
    return made


def considered_anew(asked: ZeroConfig, ranks: int, host: int) -> Any:
    found = choice_of(replace_margin(asked, 0.0), ranks, None).considered
    for each in found:
        needs = [replace(need, there=int(host * (1 - asked.auto.margin))) if "host" in need.what else need
                 for need in each.needs]  # fmt: skip
        yield replace(each, needs=needs)


def replace_margin(asked: ZeroConfig, margin: float) -> ZeroConfig:
    return load_config(asked, auto={"enabled": True, "global_batch": asked.auto.global_batch, "margin": margin})


def test_the_simplest_is_taken_where_all_fits() -> None:
    found = choice_of(load_config(stage="auto"), 2, None)
    assert found.settings["stage"] in (1, 2) and found.settings["offload.optimizer"] == "none"
    assert found.settings["activation_checkpointing.mode"] == "none" and found.settings["checkpoint.asynchronous"]


def test_what_a_user_has_set_stays() -> None:
    offload = {"optimizer": "nvme", "nvme_path": ["/drive"]}
    others: dict[str, Any] = {"activation_checkpointing": "selective", "checkpoint": {"asynchronous": False}}
    asked = load_config(stage="auto", offload=offload, reshard_after_forward=False, **others)
    found = choice_of(asked, 2, None)
    config = found.chosen.candidate.config
    assert config.offload.optimizer == "nvme" and config.reshard_after_forward is False
    assert config.activation_checkpointing.mode == "selective" and config.checkpoint.asynchronous is False
    assert "offload.optimizer" not in found.settings or found.settings["offload.optimizer"] == "nvme"
    fixed = load_config({"stage": 2, "auto": True})
    assert {each.candidate.config.stage for each in choice_of(fixed, 4, None).considered} == {2}


def test_chosen_settings_say_so() -> None:
    config = choice_of(load_config(stage="auto"), 2, None).chosen.candidate.config
    assert config.origin_of("stage") == CHOSEN


def test_the_table_tells_why_others_lost() -> None:
    asked = load_config(stage="auto", auto={"global_batch": 16})
    found = choice_of(asked, 2, 9_000_000)
    text = found.table()
    assert "chosen" in text and "% time" in text and "host memory, 2 ranks per host: " in text
    assert "activations: foreseen without memory; 10% of the memory stays free" in text
    figures = found.to_json()
    assert figures["candidates"][0]["fits"] and figures["candidates"][0]["why"] == ""


def test_nothing_fits_names_what_is_nearest_and_the_ways_out() -> None:
    with pytest.raises(
        NothingFitsError,
        match=r"nothing fits GPT on 2 rank\(s\): the nearest is stage \d.* of host memory, 2 ranks per host, and "
        r"900\.0 KB are there\. Ways out: .*offload\.nvme_path",
    ):
        choice_of(load_config(stage="auto", auto={"global_batch": 16}), 2, 1_000_000)
    with pytest.raises(NothingFitsError, match="leave open what is set: stage"):
        choice_of(load_config({"stage": 1, "auto": True}), 2, 1_000_000)


def test_without_an_example_activations_are_said_to_be_unknown() -> None:
    found = choice_of(load_config(stage="auto"), 2, None, example=None)
    assert "activations: not known, as there is no example of a batch" in found.table()
    assert "? x 1" in found.table()


@pytest.mark.parametrize(
    ("batch", "slots", "ranks", "expected"),
    [
        (0, 0, 2, [(3, 5)]),
        (8, 0, 2, [(4, 1), (2, 2), (1, 4)]),
        (12, 4, 2, [(3, 2)]),
        (6, 0, 3, [(2, 1), (1, 2)]),
    ],
)
def test_micro_batches_make_up_the_batch(batch: int, slots: int, ranks: int, expected: list[Any]) -> None:
    asked = load_config(stage="auto", auto={"global_batch": batch}, **({"reproducible": slots} if slots else {}))
    assert batches_of(asked, ranks, 3, 5) == expected


def test_a_batch_that_ranks_do_not_divide_is_refused() -> None:
    asked = load_config(stage="auto", auto={"global_batch": 10})
    text = "auto.global_batch is 10 and there are 4 ranks; the nearest that can be divided: 8 or 12"
    with pytest.raises(ValueError, match=re.escape(text)):
        batches_of(asked, 4, 0, 1)


def test_rows_that_are_not_known_stay() -> None:
    asked = load_config(stage="auto", auto={"global_batch": 16})
    assert batches_of(asked, 2, 4, 1, divides=False) == [(4, 2)]
    with pytest.raises(ValueError, match=r"auto\.global_batch is 16, 8 rows of a rank, and nothing is known of"):
        batches_of(asked, 2, 3, 1, divides=False)
    with pytest.raises(ValueError, match="give an Example"):
        choice_of(asked, 2, None, example=None)


def test_many_batches_are_spread() -> None:
    found = batches_of(load_config(stage="auto", auto={"global_batch": 5040}), 1, 0, 1)
    assert len(found) == 8 and found[0] == (5040, 1) and found[-1] == (1, 5040)


def test_stages_that_a_setting_does_not_allow_are_left_out() -> None:
    asked = load_config(stage="auto", offload={"optimizer": "nvme", "parameters": "nvme", "nvme_path": ["/drive"]})
    assert {each.candidate.config.stage for each in choice_of(asked, 2, None).considered} == {3}
    pair = load_config(stage="auto", offload={"optimizer": "cpu", "parameters": "nvme", "nvme_path": ["/drive"]})
    config = choice_of(pair, 2, None).chosen.candidate.config
    assert (config.offload.optimizer, config.offload.parameters) == ("cpu", "nvme")


def test_modes_of_a_part_of_the_units_lie_between() -> None:
    found = [
        choice_of(load_config(stage="auto", activation_checkpointing=mode), 2, None).chosen
        for mode in ("none", {"mode": "every_n", "every_n": 2}, {"mode": "budget", "budget": 0.6}, "full")
    ]
    assert found[0].activations > max(found[1].activations, found[2].activations)
    assert min(found[1].activations, found[2].activations) > found[3].activations
    assert found[0].seconds.compute < min(found[1].seconds.compute, found[2].seconds.compute)
    assert max(found[1].seconds.compute, found[2].seconds.compute) < found[3].seconds.compute


def test_ranks_that_divide_sequences_get_the_same_rows() -> None:
    asked = load_config(stage="auto", auto={"global_batch": 16}, mesh={"sequence": 2})
    candidate = choice_of(asked, 4, None).chosen.candidate
    assert candidate.rows * candidate.accumulation * 2 == 16


def test_a_section_beside_the_word() -> None:
    config = load_config({"stage": "auto", "auto": AutoConfig(global_batch=8)})
    assert config.auto.enabled and config.auto.global_batch == 8
    with pytest.raises(ValueError, match="stage is 'auto', and auto is False"):
        load_config({"stage": "auto", "auto": False})


def test_stage_auto_is_a_word_for_it() -> None:
    config = load_config({"stage": "auto"})
    assert config.auto.enabled and config.origin_of("auto.enabled") == "user: mapping"
    assert config.origin_of("stage") == "default"
    # A later layer wins, either way.
    assert load_config({"stage": 2}, stage="auto").origin_of("stage") == "default"
    both = load_config({"stage": "auto"}, stage=2)
    assert both.stage == 2 and both.auto.enabled


def test_a_rank_alone_has_one_stage_for_each_tier() -> None:
    asked = load_config(stage="auto", offload={"nvme_path": ["/drive"]})
    found = candidates(asked, plan_of(asked, 1), [(1, 1)], [{}], {})
    layouts = {(each.config.stage, each.config.offload.optimizer, each.config.offload.parameters) for each in found}
    assert layouts == {(0, "none", "none"), (0, "nvme", "none"), (3, "nvme", "nvme")}
