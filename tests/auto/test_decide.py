"""All ranks decide alike, for the scarcest of them; what is trained has the bits of the config that is pinned."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.auto.ranks import (
    EXAMPLE,
    broken_example,
    digest_of_training,
    loss,
    model,
    with_caps,
    without_a_place,
)
from tests.launcher import Launcher
from zero_strategy import ZeroEngine
from zero_strategy.auto.candidates import CHOSEN
from zero_strategy.auto.decide import decide, least_room
from zero_strategy.auto.example import of_dataset
from zero_strategy.cli.report import report_data, report_page
from zero_strategy.config import load_config, resolve
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.diagnostics.run_files import read_run
from zero_strategy.planning.machine import Machine
from zero_strategy.runtime.terminal import parse_size

SETTINGS: dict[str, Any] = {"stage": "auto", "auto": {"global_batch": 16, "enabled": True}}


def test_the_scarcest_rank_decides_for_all(ranks: Launcher) -> None:
    free, figures = ranks(2)(with_caps, {}, SETTINGS)[0]
    assert free["activation_checkpointing.mode"] == "none" and figures["rows"] == 8
    needed = figures["candidates"][0]["needs"][0]["needed"] // 2  # of two ranks
    found = ranks(2)(with_caps, {1: int(0.9 * needed)}, SETTINGS)
    assert found[0] == found[1]
    settings, figures = found[0]
    needs = next(each for each in figures["candidates"] if not each["fits"])
    assert "host memory, by the limit of a process" in needs["why"]
    assert settings["auto.enabled"] is False and figures["candidates"][0]["fits"]
    chosen = figures["rows"], settings["activation_checkpointing.mode"], settings["mmap_threshold"]
    assert chosen != (8, "none", 0)


def test_where_nothing_fits_all_ranks_are_told(ranks: Launcher) -> None:
    found = ranks(2)(with_caps, {1: 1 << 20}, SETTINGS)
    assert found[0] == found[1] and found[0].startswith("nothing fits GPT on 2 rank(s): the nearest is stage ")
    assert "Ways out: " in found[0]


def test_a_batch_that_cannot_be_divided_is_refused_on_all_ranks(ranks: Launcher) -> None:
    found = ranks(2)(with_caps, {}, {"stage": "auto", "auto": {"global_batch": 7, "enabled": True}})
    assert set(found) == {"auto.global_batch is 7 and there are 2 ranks; the nearest that can be divided: 6 or 8"}


def test_bits_are_those_of_the_pinned_config(ranks: Launcher) -> None:
    chosen = ranks(2)(digest_of_training, {"stage": "auto"}, True)
    digest, stage, origin = chosen[0]
    assert origin == CHOSEN and chosen[0] == chosen[1]
    assert ranks(2)(digest_of_training, {"stage": stage}, False)[0][0] == digest


def test_what_is_pinned_is_what_was_chosen() -> None:
    asked = load_config(stage="auto", auto={"global_batch": 8}, prefetch=2)
    found = decide(asked, model(), world_size=1, example=EXAMPLE)
    import yaml  # type: ignore[import-untyped, unused-ignore]

    pinned = load_config(yaml.safe_load(found.pinned))
    ours = {key: setting.value for key, setting in found.config.settings() if not key.startswith("auto.")}
    assert {key: setting.value for key, setting in pinned.settings() if not key.startswith("auto.")} == ours
    assert found.rows * found.accumulation == 8 and found.config.chosen is not None
    assert {key: found.config.chosen[key] for key in found.figures} == found.figures


def test_the_table_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = ZeroEngine(model(), {"stage": "auto"}, example=EXAMPLE)
    shown = [record.getMessage() for record in caplog.records if "were chosen" in record.getMessage()]
    assert len(shown) == 1 and "rows x micro-batches" in shown[0]
    engine.close()


def test_the_report_page_keeps_the_table(tmp_path: Path) -> None:
    module = model()
    recorded = {"run_dir": str(tmp_path), "flops": False, "trace_steps": 0, "memory_every_n_steps": 1}
    if not (forgets := Path("/proc/self/clear_refs")).exists():
        pytest.skip("no way to forget the peaks of other tests")
    forgets.write_text("5")
    engine = ZeroEngine(module, {"stage": "auto", "diagnostics": recorded}, example=EXAMPLE)
    more = torch.ones(256 << 20, dtype=torch.uint8)  # nobody has foreseen it
    install_diagnostics(engine)
    optimizer = torch.optim.AdamW(module.parameters())
    engine.attach(optimizer)
    for _ in range(2):
        loss(module, EXAMPLE.batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    found = report_data(read_run(tmp_path))["chosen"]
    assert "Chosen: stage 0, predicted to take " in found["said"] and found["said"].count(" (measured: ") == 2
    measured = parse_size(found["said"].split(" (measured: ")[2].partition(")")[0])
    assert 0.7 * more.nbytes <= measured < 2 * more.nbytes  # some of it may lie where the decision has left places
    first = found["rows"][0]
    assert (first["said"], first["batch"], first["why"]) == ("stage 0", "2 x 1", "chosen") and first["activations"] > 0
    page = report_page(read_run(tmp_path))
    assert "Chosen settings" in page and '"why": "chosen"' in page.replace('"why":"chosen"', '"why": "chosen"')


def test_random_states_stay() -> None:
    module = nn.Linear(3, 3)
    before = torch.get_rng_state()
    decide(load_config(stage="auto"), module, world_size=1)
    assert torch.get_rng_state().equal(before)


def test_nobody_chooses_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"auto\.enabled is True \[user: keyword\], and nothing is chosen here: Train"):
        resolve(load_config(stage="auto"), 2)


def test_the_scarcest_host_counts() -> None:
    own = 32 << 20
    rooms = [
        ("a", Machine(host_free=100 + 3 * own, gpu_free=7), 5),
        ("a", Machine(host_free=90 + 2 * own, process_free=40 + own, gpu_free=9), 6),
        ("b", Machine(host_free=80 + 2 * own, gpu_free=8), 5),
    ]
    budget, per_host = least_room(rooms, 0.2, on_host=True)
    assert (budget.host, budget.process, budget.margin, per_host) == (90, 45, 0.2, 2)
    assert least_room([("a", Machine(process_free=3), 5)], 0.2, on_host=True)[0].process == 0
    # On a device the model makes way there.
    assert least_room(rooms, 0.2, on_host=False)[0].device == 12


def test_an_error_of_one_rank_is_one_of_all(ranks: Launcher) -> None:
    found = ranks(2, timeout=60)(broken_example, {"stage": "auto"})
    assert found[0] == found[1] and found[0].startswith("LeftBehindError: ")
    found = ranks(2, timeout=60)(without_a_place, {"stage": "auto", "offload": {"nvme_path": ["/proc/nowhere"]}})
    assert found[0] == found[1] and "settings cannot be chosen (auto.enabled): rank 1: " in found[0]


def test_a_batch_of_a_data_set_has_its_largest_items() -> None:
    items = [torch.zeros(length) for length in (3, 7, 5)]
    found = of_dataset(items, lambda chosen: torch.tensor([len(each) for each in chosen]), 2, loss)
    assert found is not None and found.batch.tolist() == [7, 5]
    assert of_dataset(iter(items), list, 2, loss) is None and of_dataset(items, list, 0, loss) is None
