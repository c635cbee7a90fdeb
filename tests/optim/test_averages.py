"""Running averages of the weights, against `torch.optim.swa_utils.AveragedModel` on the gathered model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from tests.engine.nets import loss_of, net, seeded
from tests.launcher import Launcher
from tests.models import build, loss_fn, make_batch
from tests.pipeline import test_engine as pipelines
from zero_strategy import ZeroEngine
from zero_strategy.cli import main
from zero_strategy.convert.averages import averages_of
from zero_strategy.convert.convert import convert, open_any
from zero_strategy.optim.averaging import ExponentialBlend, WeightAverage
from zero_strategy.optim.full_state import safe_get_full_fp32_param
from zero_strategy.pipeline.engine import PipelineEngine

State = dict[str, Tensor]


BUFFERS = 2 * 3 * 4 + 8
"""Bytes of the averages of `Normed`'s buffers."""


class Normed(nn.Module):
    """With buffers: two floating-point ones and a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.net(x))
        return out


def made(stage: int, options: dict[str, Any]) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    dtype = options.pop("dtype", None)
    engine = ZeroEngine(seeded(Normed), {"stage": stage, **options}, compute_dtype=dtype)
    optimizer = torch.optim.AdamW(engine.module.parameters(), lr=0.05)
    engine.attach(optimizer)
    return engine, optimizer


def step(engine: ZeroEngine, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(100 * number + dist.get_rank())
    x = torch.randn(6, 6, dtype=next(engine.module.parameters()).dtype)
    loss_of(engine.module(x).float()).backward()
    optimizer.step()
    optimizer.zero_grad()


def master_state(engine: ZeroEngine) -> State:
    """All values as averages see them: fp32 master weights where there are some."""
    state = engine.full_state_dict()
    names = dict(engine.module.named_parameters())
    return {
        name: safe_get_full_fp32_param(names[name]).cpu() if name in names else value.clone()
        for name, value in state.items()
    }


def mirrored(engine: ZeroEngine) -> nn.Module:
    model = seeded(Normed)
    model.load_state_dict({n: v.float() if v.is_floating_point() else v for n, v in master_state(engine).items()})
    return model


def shown(engine: ZeroEngine, average: WeightAverage) -> State:
    with average.applied():
        return master_state(engine)


def differing(found: State, wanted: State) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name].to(found[name].dtype))]


def followed(stage: int, blend: str, options: dict[str, Any], places: str) -> list[str]:
    """Train, and let torch's class follow."""
    if "offload" in options:
        options = {**options, "offload": {**options["offload"], "nvme_path": [places], "probe_seconds": 0}}
    engine, optimizer = made(stage, dict(options))
    decays: dict[str, dict[str, Any]] = {
        "ema": {"avg_fn": get_ema_avg_fn(0.9)},
        "own": {"multi_avg_fn": get_ema_multi_avg_fn(0.75)},
        "mean": {},
    }
    own: dict[str, dict[str, Any]] = {
        "ema": {"decay": 0.9},
        "own": {"blend": own_blend},
        "mean": {"decay": None, "buffers": False},
    }
    average = engine.average_weights(every_n_steps=2, start_step=1, **own[blend])
    theirs = AveragedModel(mirrored(engine), use_buffers=own[blend].get("buffers", True), **decays[blend])
    for number in range(6):
        step(engine, optimizer, number)
        if number in (1, 3, 5):
            theirs.update_parameters(mirrored(engine))
        before = engine.full_state_dict()
        wrong = differing(shown(engine, average), theirs.module.state_dict()) if number > 1 else []
        wrong += differing(engine.full_state_dict(), before)
        if wrong:
            break
    assert average.updates == 3 or wrong
    engine.close()
    return wrong


def own_blend(average: Tensor, weights: Tensor, updates: Tensor) -> Tensor:
    return torch.lerp(average, weights, 1 - 0.75)


BF16 = {"dtype": torch.bfloat16}
TIERS = {"optimizer": "nvme", "staging_bytes": 1 << 19}
CASES: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "stage 0": (2, 0, "ema", {}),
    "stage 1": (2, 1, "ema", {}),
    "stage 2": (2, 2, "own", {}),
    "stage 3": (2, 3, "mean", {}),
    "stage 3 of one": (1, 3, "ema", {}),
    "stage 2 of three": (3, 2, "mean", {}),
    "masters": (2, 3, "ema", BF16),
    "masters, stage 1": (2, 1, "mean", BF16),
    "no masters": (2, 2, "ema", {**BF16, "precision": {"master_weights": False}}),
    "in files": (2, 3, "ema", {**BF16, "offload": TIERS}),
    "in memory beside a device": (2, 1, "mean", {"offload": {**TIERS, "optimizer": "cpu"}}),
    "copies": (4, 3, "ema", {"mesh": {"replicate": 2}}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_torchs_average_to_the_bit(ranks: Launcher, tmp_path: Path, case: str) -> None:
    world, stage, blend, options = CASES[case]
    for wrong in ranks(world)(followed, stage, blend, options, str(tmp_path)):
        assert wrong == []


# ------------------------------------------------------------------------------------- what it costs and leaves alone


def cost(stage: int, averaged: bool) -> tuple[list[Tensor], dict[str, int], list[int], list[int]]:
    """Weights after four steps, bytes of state, elements owned, then bytes in the ledger and elements of each step."""
    engine, optimizer = made(stage, {})
    average = engine.average_weights(0.9) if averaged else None
    sent = []
    for number in range(4):
        before = engine.counters.elements_sent
        step(engine, optimizer, number)
        sent.append(engine.counters.elements_sent - before)
        if average is not None:
            with average.applied(), torch.no_grad():
                engine.module(torch.ones(2, 6))
    owned = [bucket.owned.stop - bucket.owned.start for bucket in engine.model.buckets]
    kept = [entry.taken for entry in engine.ledger() if entry.category == "averages"]
    weights = list(engine.full_state_dict().values())
    bytes_of_state = engine.state_bytes()
    engine.close()
    return weights[:-3], bytes_of_state, owned, [sum(kept), *sent]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_the_same_and_nothing_more_is_sent(ranks: Launcher, stage: int) -> None:
    """BatchNorm's statistics, the last three entries, follow the forwards that show the average."""
    with_it, without = ranks(2)(cost, stage, True), ranks(2)(cost, stage, False)
    for (weights, nbytes, owned, figures), (plain, plain_bytes, _, plain_figures) in zip(with_it, without, strict=True):
        assert all(map(torch.equal, weights, plain))
        assert nbytes == {**plain_bytes, "average": 4 * sum(owned)}
        assert figures == [4 * sum(owned) + BUFFERS, *plain_figures[1:]] and plain_figures[0] == 0


# ------------------------------------------------------------------------------------- checkpoints


def saved(stage: int, options: dict[str, Any], path: str) -> tuple[State, State, int]:
    engine, optimizer = made(stage, {**options})
    average = engine.average_weights(0.8)
    for number in range(3):
        step(engine, optimizer, number)
    engine.save(path)
    found = shown(engine, average), engine.full_state_dict(), average.updates
    engine.close()
    return found


def gone_on(stage: int, options: dict[str, Any], path: str) -> tuple[State, State, int]:
    engine, optimizer = made(stage, {**options})
    average = engine.average_weights(0.8)
    step(engine, optimizer, 9)  # something else
    engine.load(path)
    found = shown(engine, average), engine.full_state_dict(), average.updates
    step(engine, optimizer, 10)
    engine.close()
    return found


@pytest.mark.parametrize("stage, world", [(1, 1), (2, 3), (0, 2)])
@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
def test_averages_checkpoint_goes_on_at_any_stage_and_number_of_ranks(
    ranks: Launcher, tmp_path: Path, stage: int, world: int, options: dict[str, Any]
) -> None:
    """Buffers are rank 0's."""
    average, weights, updates = ranks(2)(saved, 3, options, str(tmp_path / "c"))[0]
    for found in ranks(world)(gone_on, stage, options, str(tmp_path / "c")):
        assert differing(found[0], average) == [] and differing(found[1], weights) == [] and found[2] == updates == 3


def frozen_when_saved(stage: int, path: str) -> list[str]:
    """The head is frozen until the save, and trained by who loads, before whom it had other values."""
    for frozen in (True, False):
        model = seeded(Normed)
        model.net.head.requires_grad_(not frozen)
        if not frozen:
            torch.nn.init.ones_(model.net.head.weight)
        engine = ZeroEngine(model, {"stage": stage})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        engine.attach(optimizer)
        average = engine.average_weights(0.5)
        if frozen:
            step(engine, optimizer, 0)
            engine.save(path)
            wanted = shown(engine, average)
        else:
            engine.load(path)
            found = shown(engine, average)
        engine.close()
    return differing(found, wanted) if dist.get_rank() == 0 else []  # statistics are those of rank 0


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_frozen_is_averaged_from_the_loaded_weights_on(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    assert ranks(2)(frozen_when_saved, stage, str(tmp_path / "c")) == [[], []]


def without_the_other(stage: int, path: str, kept: bool) -> list[str]:
    """Save with or without an average, load without or with one."""
    engine, optimizer = made(stage, {})
    if kept:
        engine.average_weights(0.8)
    step(engine, optimizer, 0)
    engine.save(path)
    engine.close()
    engine, optimizer = made(stage, {})
    average = None if kept else engine.average_weights(0.8)
    with pytest.warns(UserWarning, match="average of the weights") if dist.get_rank() == 0 else nullcontext():
        engine.load(path)
    wrong = [] if average is None else differing(shown(engine, average), engine.full_state_dict())
    assert average is None or average.updates == 0
    engine.close()
    return wrong


@pytest.mark.parametrize("kept", [True, False])
def test_a_checkpoint_with_one_and_a_run_without_or_the_other_way_round(
    ranks: Launcher, tmp_path: Path, kept: bool
) -> None:
    assert ranks(2)(without_the_other, 2, str(tmp_path / "c"), kept) == [[], []]


# ------------------------------------------------------------------------------------- parts of a model


def in_a_pipeline(case: pipelines.Case, path: str, source: str | None) -> tuple[list[str], State, int]:
    """Three steps with the averages by hand beside them; what a checkpoint holds of both."""
    module = pipelines.module_of(case)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    engine = PipelineEngine(module, pipelines.config_of(case))
    engine.attach(optimizer)
    average = engine.average_weights(0.5)
    if source is not None:
        engine.load(source)
    with average.applied():
        wanted = engine.full_state_dict()
    for number in range(3):
        engine.forward_backward(pipelines.batches(number, case.micro_batches, module.mpu().data_parallel_id))
        optimizer.step()
        optimizer.zero_grad()
        weights = engine.full_state_dict()
        wanted = {n: 0.5 * wanted[n] + 0.5 * weights[n] if average.updates > 1 else weights[n] for n in weights}
    with average.applied():
        found = engine.full_state_dict()
        loss = engine.forward_backward(pipelines.batches(9, case.micro_batches, 0)) if source is None else None
        optimizer.zero_grad()
    engine.save(path).wait()
    assert loss is None or loss > 0
    return differing(found, wanted), found, average.updates


@pytest.mark.parametrize("zero", [1, 3])
def test_stages_of_a_pipeline_and_tied_weights(ranks: Launcher, tmp_path: Path, zero: int) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    two = ranks(2)(in_a_pipeline, pipelines.Case(2, 1, zero), first, None)
    assert [wrong for wrong, *_ in two] == [[], []]
    one = ranks(1)(in_a_pipeline, pipelines.Case(1, 1, 2), second, first)
    assert one[0][0] == [] and one[0][2] == 6


# ------------------------------------------------------------------------------------- uses and misuses


def statistics(stage: int) -> list[str]:
    engine, optimizer = made(stage, {})
    average = engine.average_weights(0.8)
    for number in range(3):
        step(engine, optimizer, number)
    own = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    plain = seeded(Normed)
    plain.load_state_dict(shown(engine, average))
    batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(number)) for number in range(4)]
    update_bn(batches, plain)
    with average.applied() as module:
        update_bn(batches, module)
    wrong = differing(dict(engine.module.named_buffers()), own)
    wrong += differing(shown(engine, average), plain.state_dict())
    engine.close()
    return wrong


@pytest.mark.parametrize("stage", [2, 3])
def test_statistics_of_batch_norm_set_by_torch_are_the_averages(ranks: Launcher, stage: int) -> None:
    assert ranks(2)(statistics, stage) == [[], []]


def unfrozen(stage: int) -> list[str]:
    model = seeded(Normed)
    model.net.head.requires_grad_(False)
    engine = ZeroEngine(model, {"stage": stage})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine.attach(optimizer)
    average = engine.average_weights(0.5)
    theirs = AveragedModel(mirrored(engine), avg_fn=get_ema_avg_fn(0.5), use_buffers=True)
    for number in range(4):
        if number == 2:
            model.net.head.requires_grad_(True)
        step(engine, optimizer, number)
        theirs.update_parameters(mirrored(engine))
    wrong = differing(shown(engine, average), theirs.module.state_dict())
    engine.close()
    return wrong


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_that_are_unfrozen_are_averaged_from_their_last_values_on(ranks: Launcher, stage: int) -> None:
    assert ranks(2)(unfrozen, stage) == [[], []]


def copied(stage: int) -> list[str]:
    engine, optimizer = made(stage, {})
    average = engine.average_weights(0.5)
    for number in range(3):
        step(engine, optimizer, number)
    wanted = shown(engine, average)
    average.copy_to_model()
    wrong = differing(engine.full_state_dict(), wanted) + differing(shown(engine, average), wanted)
    step(engine, optimizer, 4)
    average.close()
    assert engine.state_bytes().get("average") == 0
    engine.close()
    return wrong


def test_the_model_may_become_its_average(ranks: Launcher) -> None:
    assert ranks(2)(copied, 3) == [[], []]


def misused(path: str) -> list[str]:
    engine, optimizer = made(3, {})
    average = engine.average_weights(0.5)
    step(engine, optimizer, 0)
    engine.save(path)
    said = []
    calls: list[Callable[[], object]] = [
        lambda: step(engine, optimizer, 1),
        average.update,
        lambda: engine.save(path),
        average.close,
        lambda: engine.load(path),
    ]
    for call in calls:
        with average.applied(), pytest.raises(RuntimeError) as caught:
            call()
        said.append(str(caught.value))
        engine.reset()
        optimizer.zero_grad()
    step(engine, optimizer, 2)
    for wrong in (lambda a, w, n: a - a.mean(), lambda a, w, n: a.norm()[None]):
        with pytest.raises(TypeError, match="each element by itself"):
            engine.average_weights(blend=wrong)
    engine.close()
    return said


def test_misuse_is_refused_by_name(ranks: Launcher, tmp_path: Path) -> None:
    for said in ranks(2)(misused, str(tmp_path / "c")):
        assert all("leave `with average.applied():` first" in each for each in said)
        assert [each.partition(" while ")[0] for each in said] == [
            "an optimizer's step",
            "an update of the average",
            "saving optimizer state",
            "giving up the average",
            "loading a checkpoint",
        ]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"decay": 1.0}, "not 1.0"),
        ({"decay": -0.1}, "not -0.1"),
        ({"every_n_steps": -1}, "every_n_steps must not be negative, not -1"),
        ({"warmup": True, "bias_correction": True}, "give one of them"),
        ({"decay": None, "warmup": True}, "give a decay"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    engine, _ = made(1, {})
    with pytest.raises(ValueError, match=message):
        engine.average_weights(**options)
    engine.close()


def test_bias_correction_weighs_updates_as_an_average_that_began_with_zeros() -> None:
    decay, values = 0.9, [float(number**2 % 7) for number in range(20)]
    blend, average, zeros = ExponentialBlend(decay, bias_correction=True), torch.tensor(0.0), 0.0
    for updates, value in enumerate(values):
        zeros = decay * zeros + (1 - decay) * value
        weights = torch.tensor(value, dtype=torch.float64)
        average = blend(average.double(), weights, torch.tensor(updates)) if updates else weights
        assert abs(float(average) - zeros / (1 - decay ** (updates + 1))) < 1e-12
    assert [ExponentialBlend(0.5, warmup=True).decay_after(n) for n in (1, 100)] == [2 / 11, 0.5]


# ------------------------------------------------------------------------------------- in checkpoints of any kind


def saved_with_tied(path: str) -> tuple[State, State]:
    """A tied weight, low precision with master weights, a frozen parameter."""
    engine = ZeroEngine(build("transformer"), {"stage": 2}, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in engine.module.parameters() if p.requires_grad], lr=0.01)
    engine.attach(optimizer)
    average = engine.average_weights(0.6)
    for number in range(3):
        loss_fn(engine.module, make_batch("transformer", number, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.save(path)
    found = shown(engine, average), engine.full_state_dict()
    engine.close()
    return found


def test_averages_are_read_as_weights_and_written_as_such(ranks: Launcher, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    averaged, weights = ranks(2)(saved_with_tied, path)[0]
    reader = averages_of(open_any(path))
    assert differing(averaged, {name: reader.full(name) for name in averaged}) == []
    assert main(["checkpoint", "average", path, "--to", str(tmp_path / "hf"), "--format", "hf", "--quiet"]) == 0
    found = open_any(tmp_path / "hf")
    assert differing(averaged, {name: found.full(name) for name in averaged}) == []
    assert main(["checkpoint", "average", path, "--to", str(tmp_path / "b"), "--dtype", "bfloat16", "--quiet"]) == 0
    assert {spec.dtype for spec in open_any(tmp_path / "b").weights.values() if spec.dtype.is_floating_point} == {
        torch.bfloat16
    }
    for target in ("native", "torch", "dcp"):  # the weights are the model's; ours keeps both
        convert(path, tmp_path / target, to_format=target)
        again = open_any(tmp_path / target)
        assert differing({name: again.full(name) for name in weights}, weights) == [], target
        kinds = {kind for kind, tensors in again.states("0").items() if tensors}
        assert kinds == {"exp_avg", "exp_avg_sq", "master"} | ({"average"} if target == "native" else set()), target
    again = averages_of(open_any(tmp_path / "native"))
    assert differing(averaged, {name: again.full(name) for name in averaged}) == []
    with pytest.raises(ValueError, match="holds no averages"):
        averages_of(open_any(tmp_path / "b"))
    assert main(["checkpoint", "average", str(tmp_path / "b"), "--to", str(tmp_path / "x"), "--quiet"]) == 2
    assert not (tmp_path / "x").exists()
