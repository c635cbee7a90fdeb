"""Memory of a micro-batch, foreseen on tensors without any, is what it takes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpt import GPT, GPTSize, loss_fn
from tests.activation.alive import Alive, Recomputing
from zero_strategy.activation.units import outermost_names
from zero_strategy.auto import foreseen
from zero_strategy.auto.example import Example
from zero_strategy.auto.foreseen import Foreseen, LeftBehindError, Loss, MicroBatch, UnforeseenError
from zero_strategy.auto.micro_batches import ForeseenRows
from zero_strategy.auto.recomputation import MODES, Recomputation
from zero_strategy.auto.roof import Roof

SIZE, LENGTH = GPTSize(width=64, depth=3, heads=2, vocabulary=512), 32
UNITS = [f"blocks.{number}" for number in range(SIZE.depth)]


class LookingAlways(Alive):
    """Looks after each operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.look()
        return result

    @property
    def now(self) -> int:
        return sum(self._found.values())


def foresee(module: nn.Module, batch: Tensor, loss: Loss, *, mode: str = "none", **options: Any) -> Foreseen:
    return foreseen.foresee(MicroBatch(module, batch, loss, **options), mode=mode)


def tokens(rows: int) -> Tensor:
    return torch.randint(0, SIZE.vocabulary, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return loss_fn(model(batch), batch)


def run_for_real(model: nn.Module, batch: Tensor, loss: Loss = loss) -> tuple[int, int]:
    """(bytes at the end of the forward, bytes at most); gradients go as soon as they are there."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with LookingAlways() as alive:
        result = loss(model, batch)
        alive.look()
        kept = alive.now
        result.backward()
    return kept, alive.most


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_bytes_are_those_of_a_run(mode: str, rows: int) -> None:
    model = GPT(SIZE, LENGTH)
    found = foresee(model, tokens(rows), loss, mode=mode, units=UNITS)
    if mode == "full":
        model.blocks = nn.ModuleList(Recomputing(block) for block in model.blocks)
    kept, most = run_for_real(model, tokens(rows))
    assert found.kept == kept
    largest = max(parameter.nbytes for parameter in model.parameters())
    # A real run has gradients for a moment, which a plan counts.
    assert most - 2 * largest <= found.peak <= most + tokens(rows).nbytes


def test_modes_keep_less_and_compute_more() -> None:
    found = [foresee(GPT(SIZE, LENGTH), tokens(4), loss, mode=mode, units=UNITS) for mode in MODES]
    assert found[0].kept > found[1].kept > found[2].kept
    assert found[0].flops == found[1].flops < found[2].flops


def test_operations_are_those_of_a_run() -> None:
    model = GPT(SIZE, LENGTH)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss(model, tokens(2)).backward()
    # Of six products of attention the fused kind computes one once more.
    scores = counter.get_flop_counts()["Global"][torch.ops.aten.bmm] // 6
    assert foresee(model, tokens(2), loss).flops == counter.get_total_flops() + scores


def test_the_model_stays_as_it_is() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    model = Norm()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch, state = torch.randn(8, 4), torch.get_rng_state()
    foresee(model, batch, lambda m, x: m(x).sum(), mode="full", units=["inner"])
    assert torch.get_rng_state().equal(state)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert "forward" not in vars(model.inner) and all(p.grad is None for p in model.parameters())


def test_what_a_module_keeps_is_its_own() -> None:
    """Tensors without memory would be left in it."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.cache: dict[int, Tensor] = {}
            self.seen = [torch.ones(1)]
            self.mask: Tensor | None = None

        def forward(self, x: Tensor) -> Any:
            if self.mask is None:
                self.mask = torch.tril(torch.ones(4, 4))
            self.cache.setdefault(x.shape[0], torch.arange(4.0))
            self.seen.append(x)
            self.new = x
            return self.layer(x) @ self.mask + self.cache[x.shape[0]]

    model = Keeps()
    cache, seen, parameters = model.cache, model.seen, dict(model.named_parameters())
    foresee(model, torch.ones(2, 4), lambda m, x: m(x).sum())
    assert model.mask is None and not model.cache and len(model.seen) == 1 and not hasattr(model, "new")
    assert model.cache is cache and model.seen is seen
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert model(torch.ones(2, 4)).shape == (2, 4)


def test_tensors_that_are_left_behind_are_found_and_turn_no_others() -> None:
    """Such as in a cache of a function: it would give them to the training."""

    @functools.lru_cache
    def rates(count: int) -> Tensor:
        return torch.arange(float(count))

    model = nn.Linear(4, 4)
    with pytest.raises(LeftBehindError, match=r"Linear keeps tensors in a cache .* so 1 of a run without memory"):
        foresee(model, torch.ones(2, 4), lambda m, x: (m(x) * rates(4)).sum())
    with pytest.raises(AssertionError):
        model(torch.ones(2, 4)) * rates(4)


def test_a_model_that_evaluates_is_foreseen_as_it_trains() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    batch = torch.ones(32, 64)
    trained = foresee(model, batch, lambda m, x: m(x).sum())
    model.eval()
    assert foresee(model, batch, lambda m, x: m(x).sum()) == trained
    assert foresee(model, batch, lambda m, x: m(x).sum(), trains=False).kept < trained.kept
    assert not any(each.training for each in model.modules())


def test_the_batch_counts() -> None:
    small = foresee(nn.Linear(1, 1), torch.ones(8, 1), lambda m, x: m(x[:8]).sum())
    large = foresee(nn.Linear(1, 1), torch.ones(1000, 1), lambda m, x: m(x[:8]).sum())
    assert large.peak - small.peak == 4 * (1000 - 8)


def test_autocast_keeps_casts() -> None:
    model, batch = GPT(SIZE, LENGTH), tokens(2)
    cast = foresee(model, batch, loss, autocast=torch.bfloat16)
    assert cast.kept != foresee(model, batch, loss).kept
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        kept, _ = run_for_real(model, batch)
    assert cast.kept == kept


def test_a_model_on_the_meta_device_is_foreseen_alike() -> None:
    with torch.device("meta"):
        model = GPT(SIZE, LENGTH)
    assert foresee(model, tokens(2).to("meta"), loss).kept == foresee(GPT(SIZE, LENGTH), tokens(2), loss).kept


def test_a_model_that_looks_at_values_is_named() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum().item())

    with pytest.raises(UnforeseenError, match="Looks cannot be run on tensors without memory"):
        foresee(Looks(4, 4), torch.randn(2, 4), lambda m, x: m(x).sum())


def test_rows_lie_on_a_line() -> None:
    model, roof = GPT(SIZE, LENGTH), Roof(1e11, 1e10, 1e-6)
    rows = ForeseenRows(model, Example(tokens(2), loss), UNITS, 8)
    for count in (1, 2, 4, 8):
        whole = foresee(model, tokens(count), loss)
        assert rows.bytes_of(Recomputation(), count).peak == pytest.approx(whole.peak, rel=0.02)
        assert rows.seconds(Recomputation(), count, roof) == pytest.approx(roof.seconds(whole.work), rel=0.1)


def test_a_batch_has_rows() -> None:
    batch = {"x": torch.arange(6).view(3, 2), "y": [torch.arange(3), torch.tensor(1.0)], "name": "text"}
    example = Example(batch, loss)
    assert example.rows == 3 and Example([torch.ones(2), torch.ones(3)], loss).rows == 0
    assert example.of_rows(2).batch["x"].tolist() == [[0, 1], [2, 3]]
    assert example.of_rows(5).batch["y"][0].tolist() == [0, 1, 2, 0, 1]
    assert example.of_rows(5).batch["y"][1] == 1.0 and example.of_rows(5).batch["name"] == "text"


def test_units_inside_of_a_list_are_computed_again() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]))
    names = ["", "0", "0.0", "0.1", "0.1.0"]
    assert outermost_names([(name, model.get_submodule(name)) for name in names]) == ["0.0", "0.1"]


@pytest.mark.parametrize("most", [2, 8])
def test_a_batch_norm_which_refuses_one_row(most: int) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))
    example = Example(torch.randn(most, 8), lambda module, batch: module(batch).square().mean())
    rows = ForeseenRows(model, example, [], most)
    assert rows.bytes_of(Recomputation(), most).peak >= rows.bytes_of(Recomputation(), 1).peak > 0


def profiled(model: nn.Module, batch: Tensor, file: Path) -> int:
    """Bytes at most of a real run, without a mode that looks on: as torch's profiler counts them."""
    run_for_real(model, batch)  # gradients go by hooks, from now on
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        loss(model, batch).backward()
    found.export_chrome_trace(str(file))
    events = [each for each in json.loads(file.read_text())["traceEvents"] if each["name"] == "[memory]"]
    events.sort(key=lambda each: each["ts"])
    before = events[0]["args"]["Total Allocated"] - events[0]["args"]["Bytes"]
    return int(max(each["args"]["Total Allocated"] for each in events) - before)


@pytest.mark.parametrize("rows", [1, 8])
def test_gradients_that_are_summed_take_the_memory_of_one(rows: int, tmp_path: Path) -> None:
    """The model's head and embedding are one weight; autograd adds the two gradients up in place."""
    model, batch = GPT(SIZE, LENGTH), tokens(rows)
    found = foresee(model, batch, loss, units=UNITS)
    real = profiled(model, batch, tmp_path / "trace.json")
    assert found.with_gradients - batch.nbytes == pytest.approx(real, rel=0.01)
    assert found.last < 0.25 * found.peak  # the weight's gradient is there when backward is over
    assert len(found.after_units) == len(UNITS) and list(found.after_units) == sorted(found.after_units)[::-1]
