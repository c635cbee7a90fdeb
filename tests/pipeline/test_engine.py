"""Pipelines under ZeRO: what they train is what one process trains, whatever the stages, schedules and copies."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.launcher import Launcher
from zero_strategy.config import load_config, resolve
from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.engine_setup import LayerCost, choose, measured_costs
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.schedules import Placement
from zero_strategy.pipeline.simulator import Event, read_timeline
from zero_strategy.planning.buckets import held_whole

VOCABULARY, LENGTH, WIDTH, STEPS, CLIP = 23, 6, 12, 3, 0.3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


def head(embedding: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)  # type: ignore[arg-type]


def layers(tied: bool) -> list[Any]:
    middle: list[Any] = [*(LayerSpec(Block) for _ in range(6)), LayerSpec(nn.LayerNorm, WIDTH)]
    if not tied:
        return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *middle, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]
    first = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH)
    return [first, *middle, TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head)]


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def batches(
    step: int, micro_batches: int, copy: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of one data-parallel copy; the last one is shorter."""
    for number in range(micro_batches):
        rows = 1 if number == micro_batches - 1 else 2
        seed = 1000 * step + 10 * number + copy
        tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        tokens = tokens.to(device)
        yield tokens[:, :-1], tokens[:, 1:]


class Case(NamedTuple):
    stages: int
    copies: int
    zero: int
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batches: int = 3
    tied: bool = True
    gather: str = "per_micro_batch"
    release: bool = True


class Found(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def module_of(case: Case, **more: Any) -> PipelineModule:
    torch.manual_seed(0)
    shape: Any = "v" if case.schedule == "zbv" else "loop"
    return PipelineModule(layers(case.tied), case.stages, loss_fn=loss_of, chunks=case.chunks, placement=shape, **more)


def config_of(case: Case) -> dict[str, Any]:
    pipeline = {
        "stages": case.stages,
        "schedule": case.schedule,
        "chunks": case.chunks,
        "micro_batches": case.micro_batches,
        "gather": case.gather,
    }
    return {"stage": case.zero, "reshard_after_backward": case.release, "pipeline": pipeline}


def train(case: Case, device: torch.device | str = "cpu") -> Found:
    module = module_of(case).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    engine = PipelineEngine(module, config_of(case))
    engine.attach(optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        copy = module.mpu().data_parallel_id
        losses.append(float(engine.forward_backward(batches(step, case.micro_batches, copy, device))))
        norms.append(float(engine.clip_grad_norm_(CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Found(losses, norms, engine.full_state_dict())


def with_state_from_the_start() -> float:
    """Largest difference of weights from one process's: Adagrad has state of tied weights that leave it."""
    case, differences = Case(2, 1, 2), []
    models = [module_of(case), module_of(Case(1, 1, 0), rank=0)]
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.02) for model in models]
    engine = PipelineEngine(models[0], config_of(case))
    engine.attach(optimizers[0])
    for step in range(STEPS):
        engine.forward_backward(batches(step, case.micro_batches, 0))
        for inputs, labels in batches(step, case.micro_batches, 0):
            (loss_of(models[1](inputs), labels) / case.micro_batches).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in engine.full_state_dict().items():
        differences.append(float((tensor - models[1].state_dict()[name]).abs().max()))
    return max(differences)


def test_an_optimizer_with_state_from_the_start(ranks: Launcher) -> None:
    assert max(ranks(2)(with_state_from_the_start)) < 1e-5


def train_cases(cases: list[Case], device: torch.device | str = "cpu") -> list[Found]:
    return [train(case, device) for case in cases]


@functools.cache
def plain(copies: int, micro_batches: int, tied: bool, device: torch.device | str = "cpu") -> Found:
    """One process and no engine."""
    module = module_of(Case(1, 1, 0, tied=tied), rank=0).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for copy in range(copies):
            for inputs, labels in batches(step, micro_batches, copy, device):
                loss = loss_of(module(inputs), labels) / (micro_batches * copies)
                loss.backward()
                total += float(loss.detach())
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Found(losses, norms, {name: tensor.detach().clone() for name, tensor in module.state_dict().items()})


def check(ranks: Launcher, cases: list[Case]) -> None:
    by_rank = ranks(cases[0].stages * cases[0].copies, timeout=180)(train_cases, cases)
    for number, case in enumerate(cases):
        expected = plain(case.copies, case.micro_batches, case.tied)
        for found in (results[number] for results in by_rank):
            assert found.losses == pytest.approx(expected.losses, rel=1e-6), case
            assert found.norms == pytest.approx(expected.norms, rel=1e-5), case
            assert found.weights.keys() == expected.weights.keys(), case
            for name, tensor in found.weights.items():
                torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-4, atol=1e-5, msg=f"{case} {name}")


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("interleaved_zb", 2), ("zbv", 2)]


@pytest.mark.parametrize("copies", [1, 2])
def test_every_stage_of_zero(ranks: Launcher, copies: int) -> None:
    """One copy divides nothing, and `test_every_schedule` has it with ties; in two, the untied at stages 1 and 3."""
    cases = [Case(2, copies, zero, tied=False) for zero in (range(4) if copies == 1 else (1, 3))]
    if copies == 2:
        cases += [Case(2, copies, zero) for zero in range(4)]
        cases += [Case(2, copies, 3, gather="per_step"), Case(2, copies, 3, release=False)]
    check(ranks, cases)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_every_schedule(ranks: Launcher, zero: int) -> None:
    """At stage 0 those of whole backwards of one and of two chunks, and one of halves."""
    schedules = [each for each in SCHEDULES if zero or each[0] in ("1f1b", "interleaved_1f1b", "zbv")]
    check(ranks, [Case(2, 1, zero, schedule, chunks, 4) for schedule, chunks in schedules])


def test_four_stages(ranks: Launcher) -> None:
    check(ranks, [Case(4, 1, 1, "1f1b", 1, 5), Case(4, 1, 3, "zbv", 2, 2), Case(4, 1, 0, "interleaved_1f1b", 2, 4)])


# ------------------------------------------------------------------------------------- checkpoints, evaluation


def go_on(case: Case, source: str | None, folder: str, steps: tuple[int, int]) -> Found:
    """Load, take some steps, save."""
    module = module_of(case)
    if source is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(7.0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    engine = PipelineEngine(module, config_of(case))
    engine.attach(optimizer)
    if source is not None:
        engine.load(source)
    losses = []
    for step in range(*steps):
        losses.append(float(engine.forward_backward(batches(step, case.micro_batches, 0))))
        engine.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    engine.save(folder, asynchronous=case.zero == 1).wait()
    return Found(losses, [], engine.full_state_dict())


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_any_stages_goes_on_with_others(ranks: Launcher, tmp_path: Path, tied: bool) -> None:
    """With ties also where both of their ends come to one rank: one stage, and the shape of a V."""
    expected = plain(1, 3, tied)
    first, cases = str(tmp_path / "first"), [Case(2, 1, 3, tied=tied), Case(4, 1, 0, tied=tied)]
    if tied:
        cases += [Case(1, 1, 2), Case(2, 1, 1, "zbv", 2)]
    ranks(2)(go_on, Case(2, 1, 1, tied=tied), None, first, (0, 1))
    for case in cases:
        folder = tmp_path / f"{case.stages}-{case.zero}"
        ranks(case.stages)(go_on, case, first, str(folder / "same"), (1, 1))
        assert tensor_files(folder / "same") == tensor_files(Path(first)), case
        for found in ranks(case.stages)(go_on, case, first, str(folder / "after"), (1, STEPS)):
            assert found.losses == pytest.approx(expected.losses[1:], rel=1e-6), case
            for name, tensor in found.weights.items():
                torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-4, atol=1e-5)


def evaluate(case: Case) -> tuple[list[float], list[int], float]:
    module = module_of(case)
    engine = PipelineEngine(module, config_of(case))
    losses, counts = [], []
    for number in (1, 5, case.micro_batches):
        found = engine.evaluate(batches(0, number, 0), number)
        losses.append(float(found.loss))  # type: ignore[arg-type]
        counts.append(len(found.outputs))
    return losses, counts, float(engine.forward_backward(batches(0, case.micro_batches, 0)))


def test_evaluation_with_any_number_of_micro_batches(ranks: Launcher) -> None:
    module = module_of(Case(1, 1, 0), rank=0)
    with torch.no_grad():
        expected = [
            sum(float(loss_of(module(x), y)) for x, y in batches(0, number, 0)) / number for number in (1, 5, 3)
        ]
    for case in (Case(2, 1, 3), Case(2, 1, 1, "zbv", 2)):
        for rank, (losses, counts, trained) in enumerate(ranks(2)(evaluate, case)):
            assert losses == pytest.approx(expected, rel=1e-6)
            assert trained == pytest.approx(expected[2], rel=1e-6)
            last = rank == module_last_rank(case)
            assert counts == ([1, 5, 3] if last else [0, 0, 0])


def module_last_rank(case: Case) -> int:
    return 0 if case.schedule == "zbv" else case.stages - 1


# ----------------------------------------------------------------------------------------------- what goes wrong


def refused() -> list[str]:
    found = []
    for more, config in [
        ({}, {"pipeline": {"stages": 1}}),
        ({"chunks": 2}, {"pipeline": {"schedule": "1f1b"}}),
        ({}, {"pipeline": {"schedule": "interleaved_1f1b"}}),
        ({"chunks": 2}, {"pipeline": {"schedule": "zbv"}}),
        ({}, {"uneven_batches": "join"}),
    ]:
        module = PipelineModule(layers(True), 2, loss_fn=loss_of, **more)  # type: ignore[arg-type]
        try:
            PipelineEngine(module, {"stage": 1, **config})
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")
    module = PipelineModule(layers(True), 2, loss_fn=loss_of)
    engine = PipelineEngine(module, {"stage": 1})
    optimizer = torch.optim.AdamW(module.parameters())
    engine.attach(optimizer)
    try:
        engine.join_batches([])
    except ValueError as error:
        found.append(str(error))
    try:
        engine.forward_backward(batches(0, 1, 0), 2)
    except StopIteration as error:
        found.append(str(error))
    engine.reset()
    engine.forward_backward(batches(0, 2, 0), 2)
    optimizer.step()
    return found


def test_pipeline_engine_what_does_not_fit_is_refused(ranks: Launcher) -> None:
    for found in ranks(2)(refused):
        assert found[0] == ""  # the default: the module says how many
        assert "schedule 1f1b has 1 chunk per rank, not 2" in found[1]
        assert "schedule interleaved_1f1b has 2 or more chunks" in found[2] or "pipeline.chunks is 2" in found[2]
        assert "zbv places stages in the shape 'v'" in found[3]
        assert "uneven_batches is 'join' [user: mapping]" in found[4]
        assert "join_batches is for whole modules" in found[5]
        assert "micro-batch 1" in found[6] and "2" in found[6]


def from_the_other() -> list[tuple[str, int, str, float]]:
    """Modules and configs that each say one half; (schedule, chunks, shape, loss)."""
    found = []
    for more, pipeline in [
        ({"chunks": 2}, {}),
        ({"chunks": 2, "placement": "v"}, {"micro_batches": 4}),
        ({"schedule": "zbv"}, {"schedule": "zbv"}),
        ({"schedule": "interleaved_zb"}, {"schedule": "interleaved_zb"}),
        ({"schedule": "1f1b"}, {}),
    ]:
        torch.manual_seed(0)
        options: dict[str, Any] = more
        module = PipelineModule(layers(True), 2, loss_fn=loss_of, **options)
        engine = PipelineEngine(module, {"stage": 1, "pipeline": pipeline})
        optimizer = torch.optim.AdamW(module.parameters())
        engine.attach(optimizer)
        loss = engine.forward_backward(batches(0, 4, 0), 4)
        optimizer.step()
        found.append((engine.config.config.pipeline.schedule, module.chunks, module.placement.shape, float(loss)))
    return found


def test_modules_and_schedules_follow_each_other(ranks: Launcher) -> None:
    for found in ranks(2)(from_the_other):
        assert [one[:3] for one in found] == [
            ("interleaved_1f1b", 2, "loop"),
            ("zbv", 2, "v"),
            ("zbv", 2, "v"),
            ("interleaved_zb", 2, "loop"),
            ("1f1b", 1, "loop"),
        ]
        assert len({one[3] for one in found}) == 1, "the same model"


def test_a_module_names_what_contradicts_itself() -> None:
    with pytest.raises(ValueError, match="schedule 'zbv' places stages in the shape 'v', and placement is 'loop'"):
        PipelineModule(layers(True), 2, rank=0, schedule="zbv", placement="loop")
    with pytest.raises(ValueError, match="schedule zbv has 2 chunks per rank, not 3"):
        PipelineModule(layers(True), 2, rank=0, schedule="zbv", chunks=3)


# ------------------------------------------------------------------------------------------------- with the rest


def train_with(case: Case, config: dict[str, Any], dtype: str | None, scale: float) -> tuple[list[float], Any]:
    """As `train`, with more settings; the losses of the last step are made to overflow where `scale` says so."""
    module = module_of(case)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    compute_dtype = None if dtype is None else getattr(torch, dtype)
    engine = PipelineEngine(module, {**config_of(case), **config}, compute_dtype=compute_dtype)
    engine.attach(optimizer)
    losses, taken = [], []
    for step in range(STEPS):
        if module.loss_fn is not None and step == STEPS - 1:
            engine.executor.loss_fn = lambda outputs, labels: loss_of(outputs, labels) * scale
        losses.append(float(engine.forward_backward(batches(step, case.micro_batches, module.mpu().data_parallel_id))))
        taken.append(engine.unscale_gradients(optimizer))
        engine.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses, (engine.full_state_dict(), taken, engine.steps.skipped)


def test_offload_and_recomputing(ranks: Launcher, tmp_path: Path) -> None:
    """The same bits as without."""
    nvme = {"optimizer": "nvme", "parameters": "nvme", "nvme_path": [str(tmp_path)], "probe_seconds": 0.0}
    for case, config in [
        (Case(2, 1, 3), {"offload": {"optimizer": "cpu", "parameters": "cpu"}}),
        (Case(2, 1, 3), {"offload": nvme, "activation_checkpointing": {"mode": "full"}}),
        (Case(2, 1, 1, "interleaved_1f1b", 2), {"activation_checkpointing": {"mode": "selective"}}),
    ]:
        expected = ranks(2)(train_with, case, {}, None, 1.0)
        for (losses, (weights, *_)), (theirs, (plain_weights, *_)) in zip(
            ranks(2)(train_with, case, config, None, 1.0), expected, strict=True
        ):
            assert losses == theirs
            assert all(torch.equal(weights[name], tensor) for name, tensor in plain_weights.items())


def test_pipeline_engine_low_precision(ranks: Launcher) -> None:
    expected, config = plain(1, 3, True).losses, {"loss_scale": {"initial": 256.0}}
    for dtype, scale in (("bfloat16", 1.0), ("float16", 1.0), ("float16", 1e9)):
        for losses, (_, taken, skipped) in ranks(2)(train_with, Case(2, 1, 2), config, dtype, scale):
            overflows = scale > 1
            assert losses[:-1] == pytest.approx(expected[:-1], rel=0.02)
            assert taken == [True, True, not overflows] and skipped == int(overflows)


# ------------------------------------------------------------------------------------------- auto, and timelines


def runs_into(path: str) -> None:
    for steps in (3, 2):
        module = PipelineModule(layers(True), 2, loss_fn=loss_of)
        engine = PipelineEngine(module, {"stage": 1, "pipeline": {"timeline": path}})
        optimizer = torch.optim.AdamW(module.parameters())
        engine.attach(optimizer)
        for step in range(steps):
            engine.forward_backward(batches(step, 2, 0), 2)
            optimizer.step()
            optimizer.zero_grad()


def test_a_new_run_begins_its_timeline_anew(ranks: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    ranks(2)(runs_into, str(path))
    timeline = read_timeline([path])
    assert timeline.steps == [1, 2] and timeline.ranks == 2
    assert len(timeline.of_step(2).computations(0)) == 4 and timeline.of_step(2).makespan < timeline.makespan


def train_auto(case: Case, folder: str) -> tuple[list[float], str, tuple[float, ...], dict[str, Tensor]]:
    module = module_of(case)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    config = config_of(case)
    config["pipeline"]["timeline"] = f"{folder}/{case.schedule}-{case.chunks}.jsonl"
    engine = PipelineEngine(module, config)
    engine.attach(optimizer)
    losses = []
    for step in range(STEPS):
        copy = module.mpu().data_parallel_id
        losses.append(float(engine.forward_backward(batches(step, case.micro_batches, copy))))
        engine.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    assert engine.chosen is not None
    return losses, engine.chosen.schedule, engine.chosen.activation_bytes, engine.full_state_dict()


def test_auto_takes_one_schedule_on_all_ranks_and_trains_the_same(ranks: Launcher, tmp_path: Path) -> None:
    for case, names in [
        (Case(2, 2, 2, "auto"), {"gpipe", "1f1b", "zb_h1"}),
        (Case(2, 1, 1, "auto", 2), {"gpipe", "interleaved_1f1b", "interleaved_zb"}),
    ]:
        expected = plain(case.copies, case.micro_batches, case.tied)
        found = ranks(case.stages * case.copies)(train_auto, case, str(tmp_path))
        assert len({one[1] for one in found}) == 1 and found[0][1] in names
        for losses, _, held, weights in found:
            assert losses == pytest.approx(expected.losses, rel=1e-6)
            assert all(nbytes > 0 for nbytes in held)
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-4, atol=1e-5)
        timeline = read_timeline([tmp_path / f"auto-{case.chunks}.jsonl"])
        computed = [event for event in timeline.events if event.computes]
        assert (timeline.ranks, timeline.chunks) == (2, case.chunks)
        forwards = [event for event in computed if event.kind == "F"]
        assert len(forwards) == STEPS * 2 * case.chunks * case.micro_batches


def ranks_of_my_host(hosts: int) -> list[int]:
    """Numbers of ranks that `auto` lets share a host's memory, each rank in a PID namespace of its own."""
    name, found = f"boot-{dist.get_rank() % hosts} pid:[{dist.get_rank()}]", []

    def left(device: torch.device, ranks_here: int, held: int) -> None:
        found.append(ranks_here)

    with patch.multiple("zero_strategy.pipeline.engine", host=lambda: name, memory_left=left):
        case = Case(2, 1, 2, "auto")
        PipelineEngine(module_of(case), config_of(case)).forward_backward(batches(0, case.micro_batches, 0))
    return found


@pytest.mark.parametrize(("hosts", "each"), [(1, 2), (2, 1)])
def test_auto_counts_the_ranks_of_a_host(ranks: Launcher, hosts: int, each: int) -> None:
    assert ranks(2)(ranks_of_my_host, hosts) == [[each]] * 2


def test_auto_by_the_numbers() -> None:
    placement = Placement(2)
    costs = [LayerCost(1.0, 1.0, 1.0, 2.0, 10.0)] * 2
    assert choose(placement, 8, costs, [None, None]).schedule == "zb_h1"
    assert choose(placement, 8, costs, [15, 15]).schedule == "1f1b"  # nothing fits: what holds least
    heavy = [LayerCost(1.0, 1.0, 1.0, 1.2, 10.0)] * 2  # halves cost more than the whole
    assert choose(placement, 8, heavy, [None, None]).schedule == "1f1b"
    cramped = choose(placement, 8, costs, [25, 25])
    assert max(cramped.activation_bytes) <= 25
    events = [[Event(0, t, t + d, kind, m) for m, t, d, kind in rows] for rows in EVENTS]
    found = measured_costs(placement, events, [{0: 5}, {0: 6}])
    assert [(one.forward, one.whole, one.activation_bytes) for one in found] == [(1.0, 3.0, 5), (2.0, 4.0, 6)]


EVENTS = [
    [(0, 0.0, 1.0, "F"), (1, 1.0, 1.0, "F"), (2, 2.0, 9.0, "F"), (0, 20.0, 3.0, "B"), (0, 5.0, 7.0, "wait")],
    [(0, 1.0, 2.0, "F"), (0, 3.0, 4.0, "B")],
]


# ------------------------------------------------------------------------------------------------ after a failure


@pytest.mark.parametrize(
    ("when", "failing", "by_hand"),
    [("per_step", 1, True), ("per_step", 3, False), ("per_micro_batch", 1, False)],
)
def test_a_weight_half_that_fails_is_over(when: str, failing: int, by_hand: bool) -> None:
    case, calls = Case(1, 1, 2, "zb_h1"), [0]
    module = module_of(case)
    engine = PipelineEngine(module, {**config_of(case), "gradient_reduction": when})

    def fail(gradient: Tensor) -> None:
        calls[0] += 1
        if calls[0] == failing:
            raise ArithmeticError("no weight half today")

    module.get_parameter("1.up.weight").register_hook(fail)
    with pytest.raises(ArithmeticError):
        engine.forward_backward(batches(0, case.micro_batches, 0))
    engine.reset()
    before = engine.model.reducer.reductions
    if by_hand:
        inputs, labels = next(batches(0, 1, 0))
        loss_of(module(inputs), labels).backward()
    else:
        engine.evaluate(batches(0, case.micro_batches, 0))
    assert engine.model.reducer.reductions == before + by_hand  # one of the failed half would be of this rank alone
    module.zero_grad()
    loss = engine.forward_backward(batches(0, case.micro_batches, 0))
    norm = engine.clip_grad_norm_(CLIP)
    expected = plain(case.copies, case.micro_batches, case.tied)
    assert (float(loss), float(norm)) == pytest.approx((expected.losses[0], expected.norms[0]), rel=1e-6)


# ------------------------------------------------------------------------------------------------ what is sent


def sent(case: Case) -> list[tuple[int, dict[str, int]]]:
    """Of the third step: elements of this rank's parameters, padded, and what was sent by kind."""
    module = module_of(case)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    engine = PipelineEngine(module, config_of(case))
    engine.attach(optimizer)
    found: dict[str, int] = {}
    for step in range(3):
        engine.counters.reset()
        engine.forward_backward(batches(step, case.micro_batches, module.mpu().data_parallel_id))
        optimizer.step()
        optimizer.zero_grad()
        found = {kind: count for kind, count in engine.counters.elements.items() if kind != "control" and count}
    return [(sum(bucket.layout.numel for bucket in engine.model.buckets), found)]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2)])
def test_elements_sent_are_those_of_the_stages_of_zero(ranks: Launcher, schedule: str, chunks: int) -> None:
    """On two copies every rank sends half of what it reduces or gathers, whatever backwards are made of."""
    count = 4
    for zero, reductions in ((1, 1), (2, count), (3, count)):
        case = Case(2, 2, zero, schedule, chunks, count, tied=False, gather="per_step")
        for found in ranks(4)(sent, case):
            ((numel, kinds),) = found
            assert kinds == {"reduce_scatter": reductions * numel // 2, "all_gather": numel // 2}, case


def gathered(case: Case, budgets: list[int | None]) -> list[tuple[int, list[int], dict[str, Tensor]]]:
    """With so many bytes for parameters during a step: elements sent to gather, the units' bytes, the weights."""
    found = []
    for budget in budgets:
        module, config = module_of(case), config_of(case)
        config["pipeline"]["gather_bytes"] = budget
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
        engine = PipelineEngine(module, config)
        engine.attach(optimizer)
        for step in range(3):
            engine.counters.reset()
            engine.forward_backward(batches(step, case.micro_batches, module.mpu().data_parallel_id))
            optimizer.step()
            optimizer.zero_grad()
        elements = engine.counters.elements["all_gather"]
        sizes = [sum(4 * bucket.layout.numel for bucket in unit.buckets) for unit in engine.model.units]
        found.append((elements, sizes, engine.full_state_dict()))
    return found


def test_gathers_by_a_budget_of_bytes(ranks: Launcher) -> None:
    """One copy of a unit's elements is sent less for each micro-batch that need not gather it."""
    case = Case(2, 2, 3, micro_batches=4, tied=False)
    first = ranks(4)(gathered, case, [None, 0, 1 << 40])
    half = sum(first[0][0][1]) // 2
    for rank, ((each, sizes, weights), (none, *_), (once, *_)) in enumerate(first):
        assert each == none and once == sum(sizes) // 4 // 2, rank
        assert weights.keys() == first[0][0][2].keys()
    for rank, ((some, sizes, weights),) in enumerate(ranks(4)(gathered, case, [half])):
        (each, _, expected), _, (once, *_) = first[rank]
        held = held_whole(sizes, load_config({"pipeline": {"gather_bytes": half}}).pipeline)
        saved = sum(sizes[number] for number in held) // 4 // 2
        assert 0 < len(held) < len(sizes) - 1 and once < some < each
        assert some <= each - saved, rank  # once instead of 4 times, at least
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_which_units_are_held() -> None:
    for settings, held in [
        ({"gather_bytes": 10}, [0, 2]),
        ({"gather": "per_step"}, [0, 1, 2, 3]),
        ({"gather": "per_step", "gather_bytes": 0}, []),
        ({}, []),
    ]:
        assert held_whole([4, 7, 6, 1], resolve(load_config({"pipeline": settings}), 1).config.pipeline) == held


def test_a_plan_counts_what_is_held() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    each, peaks = 4 * 64 * 64, []
    for settings in ({}, {"gather_bytes": 0}, {"gather_bytes": 3 * each}, {"gather": "per_step"}):
        config = load_config({"stage": 3, "units": {"patterns": ["?"]}, "prefetch": 0, "pipeline": settings})
        plan = config.plan(model, world_size=2, device="cpu").ledger(0)
        peaks.append(plan.peaks().only(category="gather buffers").total.taken)
    assert peaks == [each, each, 4 * each, 6 * each]  # what is held, and one more in use
