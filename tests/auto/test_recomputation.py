"""Budgets and tiles are foreseen as they run, and chosen where memory is scarce and keeping all would be quicker."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.activation.alive import Recomputing
from tests.auto.test_choice import EXAMPLE, ROOF, choice_of, yaml_of
from tests.auto.test_foreseen import run_for_real, tokens
from zero_strategy import ZeroEngine
from zero_strategy.auto.candidates import pinned
from zero_strategy.auto.choice import choose
from zero_strategy.auto.decide import micro_batches, without_auto
from zero_strategy.auto.example import Example
from zero_strategy.auto.foreseen import MicroBatch
from zero_strategy.auto.micro_batches import ForeseenRows, may_tile
from zero_strategy.auto.recomputation import Recomputation
from zero_strategy.config import load_config
from zero_strategy.integrations.transformers import divide_sequences, tiles_of
from zero_strategy.planning.memory_plan import plan_model
from zero_strategy.planning.room import Budget


class Layer(nn.Module):
    """A unit whose inside has any width."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), *[Layer(inner) for inner in (16, 512, 64, 256, 32)], nn.Linear(16, 1))


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).square().mean()


UNITS = [str(number) for number in range(1, 6)]


@pytest.mark.parametrize("budget", [0.9, 0.75, 0.6])
@pytest.mark.parametrize("stage", [1, 3])
def test_units_of_a_budget_are_those_that_a_run_chooses(budget: float, stage: int) -> None:
    batch, model = torch.randn(32, 8), net()
    found = Recomputation("budget", budget).units_again(MicroBatch(model, batch, loss, UNITS))
    assert 0 < len(found) < len(UNITS)
    checkpointing = {"mode": "budget", "budget": budget}
    engine = ZeroEngine(
        model, {"stage": stage, "units": {"classes": ["Layer"]}, "activation_checkpointing": checkpointing}
    )
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach(optimizer)
    loss(model, batch).backward()
    optimizer.step()
    assert engine.activations.recomputed == found
    engine.close()


@pytest.mark.parametrize("way", [Recomputation("budget", 0.6), Recomputation("every_n", every_n=2)])
def test_bytes_of_a_part_are_those_of_a_run(way: Recomputation) -> None:
    batch, model = torch.randn(256, 8), net()
    given = MicroBatch(model, batch, loss, UNITS)
    names, found = way.units_again(given), way.foresee(given)
    for name in names:
        model[int(name)] = Recomputing(model[int(name)])
    kept, most = run_for_real(model, batch, loss)
    assert found.kept == kept
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert most - 2 * largest <= found.peak <= most + batch.nbytes


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def loss_of_tokens(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(input_ids=batch, labels=batch).loss
    return found


def test_tiles_are_foreseen_as_they_run() -> None:
    model, batch = llama(), tokens(4)
    units = [f"model.layers.{number}" for number in range(3)]
    plain = MicroBatch(model, batch, loss_of_tokens, units)
    tiles = tiles_of(model)
    assert tiles is not None
    found = Recomputation(tile_tokens=64).foresee(plain._replace(around=lambda: tiles(64)))
    assert found.peak < 0.7 * Recomputation().foresee(plain).peak
    assert not any("forward" in vars(module) for module in model.modules())
    with tiles(64):
        kept, most = run_for_real(model, batch, loss_of_tokens)
    assert found.kept == kept
    # The gradient of the head's weight is made in the forward, and is no gradient of a parameter yet.
    assert most - 2 * 4 * 512 * 32 <= found.peak <= most + batch.nbytes
    assert loss_of_tokens(model, batch).item() > 0


@pytest.mark.parametrize("way", [Recomputation(tile_tokens=256), Recomputation("full", tile_tokens=256)])
def test_few_rows_have_no_tiles(way: Recomputation) -> None:
    """Their MLPs keep all, as many tokens as are in a tile are computed at once."""
    model, batch = llama(), torch.zeros(8, 256, dtype=torch.long)
    tiles = tiles_of(model)
    assert tiles is not None
    units = [f"model.layers.{number}" for number in range(3)]
    rows = ForeseenRows(model, Example(batch, loss_of_tokens), units, 8, tiles=tiles)
    for count in (1, 2, 4, 8):
        given = MicroBatch(model, batch[:count], loss_of_tokens, units, around=lambda: tiles(256))
        found, run = rows.bytes_of(way, count), way.foresee(given)
        assert (found.peak, found.with_gradients, found.made) == (run.peak, run.with_gradients, run.made)


def test_what_is_not_known_counts_as_what_keeps_more() -> None:
    model = llama()
    rows = ForeseenRows(model, Example(tokens(8), loss_of_tokens), [f"model.layers.{n}" for n in range(3)], 8)
    full = rows.bytes_of(Recomputation("full"), 8)
    assert rows.bytes_of(Recomputation("full", tile_tokens=16), 8) == full
    assert full.peak < rows.bytes_of(Recomputation(), 8).peak == rows.bytes_of(Recomputation("budget", 0.001), 8).peak


def test_units_that_are_called_as_often_as_there_are_rows() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(32)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.layer(part) for part in x.split(4)])

    rows = ForeseenRows(Turns(), Example(torch.randn(16, 16), loss), ["layer"], 16)
    assert rows.bytes_of(Recomputation(), 8).after_units == ()
    assert rows.bytes_of(Recomputation("full"), 8).peak < rows.bytes_of(Recomputation(), 8).peak


def test_tiles_go_with_no_divided_mesh() -> None:
    assert may_tile(load_config(stage=2))
    assert not any(
        may_tile(load_config(stage=1, mesh=mesh)) for mesh in ({"tensor": 2}, {"sequence": 2}, {"expert": 2})
    )


def test_models_without_tiles_have_none() -> None:
    assert tiles_of(net()) is None


def seen(host: int | None, **settings: Any) -> Any:
    """The choice for a llama that has tiles."""
    asked = load_config(stage="auto", auto={"global_batch": 16}, **settings)
    model, example = llama(), Example(tokens(2), loss_of_tokens)
    plan = plan_model(model, without_auto(asked), world_size=2, device="cpu")
    batches, unknown = micro_batches(asked, plan, model, example, tiles_of(model))
    budget = Budget(host=host, disk=1 << 40, margin=asked.auto.margin)
    return choose(asked, plan, budget, ROOF, batches, rows=2, unknown=unknown)


def test_what_saves_is_looked_at_where_memory_is_scarce_alone() -> None:
    found = choice_of(load_config(stage="auto", auto={"global_batch": 16}), 2, None)
    assert not any(each.candidate.way.budget for each in found.considered)
    ample = seen(None)
    assert not any(each.candidate.way.tile_tokens for each in ample.considered)


def test_a_budget_is_chosen_where_it_is_the_quickest_that_fits() -> None:
    """The room is what a budget's candidate needs; keeping all does not fit, computing all again is slower."""
    settings: dict[str, Any] = {"stage": 1, "mmap_threshold": 131072, "checkpoint": {"asynchronous": False}}
    auto, example = {"enabled": True, "margin": 0.0}, EXAMPLE.of_rows(16)
    budget = {"mode": "budget", "budget": 0.5}
    fixed = load_config({**settings, "auto": auto, "activation_checkpointing": budget})
    wanted = choice_of(fixed, 2, None, example).chosen
    asked = load_config({**settings, "auto": auto})
    found = choice_of(asked, 2, max(need.needed for need in wanted.needs if need.what.startswith("host")), example)
    assert found.chosen.candidate.way == Recomputation("budget", 0.5)
    assert yaml_of(found)["activation_checkpointing"] == budget
    assert "keeps 50% of activations" in found.table()
    # A user's mode is a constraint, and so is a budget.
    for mode in ("none", {"mode": "budget", "budget": 0.9}):
        fixed = load_config({**settings, "auto": auto, "activation_checkpointing": mode})
        ways = {each.candidate.way for each in choice_of(fixed, 2, None).considered}
        assert ways == {Recomputation("none") if mode == "none" else Recomputation("budget", 0.9)}


def test_tiles_are_chosen_where_nothing_else_fits() -> None:
    settings: dict[str, Any] = {"mmap_threshold": 131072, "checkpoint": {"asynchronous": False}}
    ample = seen(None, **settings)
    most = min(need.needed for each in ample.considered for need in each.needs if need.what.startswith("host"))
    tiled = {"mode": "full", "tile_tokens": 256}
    least = min(
        need.needed
        for each in seen(None, **settings, activation_checkpointing=tiled).considered
        for need in each.needs
        if need.what.startswith("host")
    )
    assert least < most
    found = seen(int((least + most) / 2 / 0.9), **settings)
    assert found.chosen.candidate.way.tile_tokens == 256
    assert yaml_of(found)["activation_checkpointing"]["tile_tokens"] == 256
    assert "tiles of 256 tokens" in found.table()


def test_a_loss_that_reads_logits_has_no_tiles() -> None:
    asked, model = load_config(stage="auto"), llama()
    example = Example(tokens(2), lambda module, batch: module(input_ids=batch, labels=batch).logits.square().mean())
    plan = plan_model(model, without_auto(asked), world_size=1, device="cpu")
    batches, _ = micro_batches(asked, plan, model, example, tiles_of(model))
    assert batches is not None and not batches.knows(Recomputation(tile_tokens=16))


def test_a_budget_that_nothing_keeps_to_is_not_known() -> None:
    asked = load_config(stage="auto")
    plan = plan_model(net(), without_auto(asked), world_size=1, device="cpu")
    batches, _ = micro_batches(asked, plan, net(), Example(torch.randn(4, 8), loss))
    assert batches is not None and not batches.knows(Recomputation("budget", 0.01))


def test_a_chosen_setting_is_no_reason_to_fail() -> None:
    """The first of several models decides; another one may have no tiles, and its units another size."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=512, **shape))
    settings = {
        "activation_checkpointing.mode": "budget",
        "activation_checkpointing.budget": 0.01,
        "activation_checkpointing.tile_tokens": 16,
    }
    config = pinned(load_config(stage=1, units={"classes": ["BertLayer"]}), settings)
    engine = ZeroEngine(bert, config)
    assert divide_sequences(engine) == []
    optimizer = torch.optim.AdamW(bert.parameters())
    engine.attach(optimizer)
    loss_of_tokens(bert, tokens(2)).backward()
    optimizer.step()
    assert engine.activations.recomputed
    engine.close(gather=True)
    mine = load_config(stage=1, activation_checkpointing={"tile_tokens": 16})
    with pytest.raises(ValueError, match="BertForMaskedLM is no causal language model"):
        divide_sequences(ZeroEngine(bert, mine))
