"""Muon and other optimizers of whole matrices at stages 1 to 3, to the bit of plain torch."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from tests.engine.nets import loss_of, net, seeded
from tests.engine.trainings import DEFAULTS, PlainTraining, Setting, play
from tests.launcher import Launcher
from tests.pipeline import test_engine as pipelines
from zero_strategy import ZeroEngine
from zero_strategy.checkpoint.reader import CheckpointReader
from zero_strategy.config import UnitsConfig
from zero_strategy.convert.convert import convert
from zero_strategy.fsdp.layout import pack
from zero_strategy.optim import MuonAdamW, muon, orthogonaliser, split_matrices
from zero_strategy.optim.orthogonaliser import Matrix, owners, rounds
from zero_strategy.pipeline.engine import PipelineEngine

MUON = {"matrix_optimizers": ["Muon"]}


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of the blocks, and all others."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks.")]
    kept = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in kept]


def trained(training: PlainTraining, accumulation: int, clip: bool) -> None:
    model = net()
    training.shard(model)
    matrices, others = split(model)
    training.attach(
        Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.01, foreach=False),
    )
    for step in range(3):
        for micro in range(accumulation):
            loss = loss_of(model(training.data(accumulation * step + micro, 2, 6))) / accumulation
            training.note(loss)
            training.backward(loss)
        if clip:
            training.clip_exactly(0.5)
        training.step()
        training.zero_grad()


def settings(options: dict[str, Any]) -> list[Setting]:
    return [Setting(setting.stage, setting.order, options) for setting in DEFAULTS]


# All trainings on two ranks; on one and on four, where matrices are divided otherwise, the one that does most.
@pytest.mark.parametrize(
    "world, accumulation, clip",
    [(1, 2, True), (2, 1, False), (2, 3, False), (2, 1, True), (2, 2, True), (4, 2, True)],
)
def test_muon_has_the_bits_of_plain_torch(ranks: Launcher, world: int, accumulation: int, clip: bool) -> None:
    script = partial(trained, accumulation=accumulation, clip=clip)
    for wrong in ranks(world)(play, script, settings({})):
        assert not wrong


LAYOUTS = {"apart": {"matrix_parameters": ["blocks.*"]}, "whole on one rank": MUON}


@pytest.mark.parametrize("world, layout", [(2, "apart"), (2, "whole on one rank"), (4, "whole on one rank")])
def test_muon_in_buckets_of_its_own(ranks: Launcher, world: int, layout: str) -> None:
    for wrong in ranks(world)(play, partial(trained, accumulation=2, clip=True), settings(LAYOUTS[layout])):
        assert not wrong


FURTHER = {
    "copies, in slices": (4, Setting(3, "per_micro_batch", {"mesh": {"replicate": 2}})),
    "three ranks, in slices": (3, Setting(2, "per_micro_batch", {})),
    "copies": (4, Setting(3, "per_micro_batch", {**MUON, "mesh": {"replicate": 2}})),
    "kept whole": (2, Setting(3, "per_micro_batch", {**MUON, "reshard_after_backward": False})),
    "three ranks": (3, Setting(2, "per_micro_batch", MUON)),
    "by pattern": (2, Setting(3, "per_step", {**MUON, "matrix_parameters": ["blocks.*.weight"]})),
}


@pytest.mark.parametrize("case", FURTHER)
def test_muon_on_other_meshes_and_settings(ranks: Launcher, case: str) -> None:
    world, setting = FURTHER[case]
    tolerance = 1e-6 if case.startswith("copies") else 0.0  # whose sums over ranks have another order
    for wrong in ranks(world)(play, partial(trained, accumulation=2, clip=False), [setting], tolerance=tolerance):
        assert not wrong


class Whitening(Optimizer):
    """Steps along the orthogonal factor of each matrix's gradient, with a momentum; others by their sign."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "use_muon": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                if group["use_muon"]:
                    u, _, v = torch.linalg.svd(momentum.double(), full_matrices=False)
                    p.sub_((u @ v).float(), alpha=group["lr"])
                else:
                    p.sub_(momentum.sign(), alpha=group["lr"])


def as_one(training: PlainTraining, one: bool, fused: bool = False) -> None:
    """One optimizer or two; the state is that of a parameter either way."""
    model = net()
    training.shard(model)
    found = split_matrices(model, ["blocks.*.weight"])
    options: dict[str, dict[str, Any]] = {"muon": {"lr": 0.02}, "adamw": {"lr": 0.01, "foreach": False}}
    if fused:
        del options["adamw"]["foreach"]
    if one:
        optimizer = MuonAdamW(found, **options)
        training.attach(optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    else:
        training.attach(Muon(found.matrices, **options["muon"]), torch.optim.AdamW(found.others, **options["adamw"]))
    for step in range(3):
        training.backward(loss_of(model(training.data(step, 2, 6))))
        training.step()
        training.zero_grad()
        for group in training.optimizers[-1].param_groups[-1:] + training.optimizers[0].param_groups[:1]:
            if not one:
                group["lr"] = options["muon" if "ns_steps" in group else "adamw"]["lr"] / (2 + step)
        if one:
            schedule.step()


def test_muon_and_adamw_as_one_optimizer(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, partial(as_one, one=True), settings({})):
        assert not wrong
    for wrong in ranks(2)(play, partial(as_one, one=True), settings({"matrix_optimizers": ["MuonAdamW"]})):
        assert not wrong
    for wrong in ranks(2)(play, partial(as_one, one=True, fused=True), settings({})[:1]):
        assert not wrong
    both = [weights_of(one) for one in (True, False)]
    assert all(map(torch.equal, *both))
    with pytest.raises(ValueError, match=r"no trained matrix is in a repeated member of a container.*patterns"):
        split_matrices(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no other parameters"):
        MuonAdamW(split_matrices(nn.Linear(2, 2, bias=False), ["weight"]))


def weights_of(one: bool) -> list[Tensor]:
    training = PlainTraining(Setting(0, "per_step"))
    as_one(training, one)
    return [parameter.detach() for parameter in training.module.parameters()]


def with_own_class(training: PlainTraining) -> None:
    model = net()
    training.shard(model)
    matrices, others = split(model)
    training.attach(Whitening([{"params": matrices}, {"params": others, "use_muon": False, "lr": 0.01}]))
    for step in range(3):
        training.backward(loss_of(model(training.data(step, 2, 6))))
        training.step()
        training.zero_grad()


def test_an_own_class_of_matrices_and_others(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, with_own_class, settings({"matrix_optimizers": ["Whitening"]})):
        assert not wrong


def in_low_precision(stage: int, dtype: torch.dtype, masters: bool, layout: dict[str, Any]) -> dict[str, Tensor]:
    model = net()
    options = {"units": {"min_numel": 0}, "precision": {"master_weights": masters}, "fused_optimizers": False}
    engine = ZeroEngine(model, {"stage": stage, **options, **layout}, compute_dtype=dtype)
    matrices, others = split(model)
    optimizers = [Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, foreach=False)]
    engine.attach(*optimizers)
    for number in range(3):
        torch.manual_seed(10 * number + dist.get_rank())
        engine.scale_loss(loss_of(model(torch.randn(2, 6).to(dtype)).float())).backward()
        for optimizer in optimizers:
            engine.unscale_gradients(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    found = engine.full_state_dict()
    engine.close()
    return found


@pytest.mark.parametrize("dtype, masters", [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)])
def test_low_precision_is_that_of_stage_0(ranks: Launcher, dtype: torch.dtype, masters: bool) -> None:
    wanted = ranks(2)(in_low_precision, 0, dtype, masters, {})[0]
    for stage, layout in ((1, MUON), (2, MUON), (3, MUON), (1, {}), (2, {}), (3, {})):
        for found in ranks(2)(in_low_precision, stage, dtype, masters, layout):
            # Of a transposed update torch's own sum rounds twice in bfloat16; a slice has it contiguous.
            roundings = 2**-6 if not masters and not layout else 0.0
            for name, values in wanted.items():
                torch.testing.assert_close(found[name], values, rtol=0.0, atol=roundings)


def in_a_pipeline(case: pipelines.Case) -> dict[str, Tensor]:
    module = pipelines.module_of(case)
    blocks = [p for name, p in module.named_parameters() if name.endswith((".up.weight", ".down.weight"))]
    kept = set(map(id, blocks))
    optimizers = [
        Muon(blocks, lr=0.02),
        torch.optim.AdamW([p for p in module.parameters() if id(p) not in kept], lr=0.01, foreach=False),
    ]
    patterns: dict[str, Any] = {"matrix_parameters": ["*.up.weight", "*.down.weight"], "fused_optimizers": False}
    patterns |= {"gradient_reduction": "per_micro_batch"}  # one order of sums: rounding grows in Newton-Schulz
    engine = PipelineEngine(module, {**pipelines.config_of(case), **patterns})
    engine.attach(*optimizers)
    for number in range(3):
        engine.forward_backward(pipelines.batches(number, case.micro_batches, module.mpu().data_parallel_id))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return engine.full_state_dict()


@pytest.mark.parametrize("zero", [1, 3])
def test_stages_of_a_pipeline(ranks: Launcher, zero: int) -> None:
    wanted = ranks(4)(in_a_pipeline, pipelines.Case(2, 2, 0))[0]
    for found in ranks(4)(in_a_pipeline, pipelines.Case(2, 2, zero)):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# ------------------------------------------------------------------------------------- state in tiers


def offloaded(training: PlainTraining, one: bool) -> None:
    """Muon beside AdamW, whose states lie in a tier; the first two steps leave some matrices out."""
    model = net()
    training.shard(model)
    found = split_matrices(model)
    if one:
        muon, adamw = {"lr": 0.02, "nesterov": False}, {"lr": 0.01, "foreach": False}
        training.attach(MuonAdamW(found, muon=muon, adamw=adamw, ns_dtype="float32"))
    else:
        training.attach(Muon(found.matrices, lr=0.02), torch.optim.RMSprop(found.others, lr=0.01, foreach=False))
    for step in range(4):
        training.backward(loss_of(model(training.data(step, 2, 6))))
        training.clip_exactly(0.5)
        training.step()
        training.zero_grad()


@pytest.mark.parametrize("one, world", [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_state_in_host_memory_and_in_files(ranks: Launcher, tmp_path: Path, world: int, one: bool) -> None:
    memory: dict[str, Any] = {"optimizer": "cpu"}
    files = {"optimizer": "nvme", "parameters": "nvme", "nvme_path": str(tmp_path), "staging_bytes": 65536}
    files["probe_seconds"] = 0  # how fast the drive is says nothing here
    apart = {"matrix_parameters": ["blocks.*"]}
    cases = [(0, memory, {}), (1, memory, {}), (2, memory, apart), (3, files, {}), (3, files, apart), (2, memory, MUON)]
    found = [
        Setting(stage, "per_micro_batch" if stage > 1 else "per_step", {"offload": offload, **layout})
        for stage, offload, layout in cases
        if not (one and layout is MUON)
    ]
    tolerance = 1e-5 if one else 0.0  # in tiers AdamW takes fused steps, which round otherwise
    for wrong in ranks(world)(play, partial(offloaded, one=one), found, tolerance=tolerance):
        assert not wrong


# ------------------------------------------------------------------------------------- bytes and messages


def figures(stage: int, muon: str) -> tuple[dict[str, int], int, int, int]:
    """Bytes of state, elements that a step sends, elements of matrices, and of all."""
    model = seeded(Wide)
    options = MUON if muon == "whole" else {}
    engine = ZeroEngine(model, {"stage": stage, "units": {"min_numel": 0}, **options})
    found = split_matrices(model)
    if muon == "whole":
        engine.attach(Muon(found.matrices, lr=0.02), torch.optim.AdamW(found.others, lr=0.01))
    elif muon:
        engine.attach(MuonAdamW(found, adamw={"lr": 0.01}))
    else:
        engine.attach(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(2):
        engine.counters.reset()
        loss_of(model(torch.randn(2, 64))).backward()
        for sharded in engine.optimizers:
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
    sent, nbytes = engine.counters.elements_sent, engine.state_bytes()
    held = sum(p.numel() for p in found.matrices)
    engine.close()
    return nbytes, sent, held, sum(p.numel() for p in model.parameters())


class Layer(nn.Module):
    """Matrices of a Llama's proportions."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"q": (64, 64), "k": (16, 64), "v": (16, 64), "o": (64, 64)}
        shapes |= {"gate": (224, 64), "up": (224, 64), "down": (64, 224)}
        for name, (rows, columns) in shapes.items():
            self.register_module(name, nn.Linear(columns, rows, bias=False))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = torch.cat([self.k(y), self.v(y), self.k(y), self.v(y)], dim=-1) * self.q(y)
        x = x + self.o(y)
        out: Tensor = x + self.down(torch.tanh(self.gate(x)) * self.up(x))
        return out


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("world, stage", [(2, 1), (2, 2), (2, 3), (4, 1), (4, 3)])
def test_moments_are_on_one_rank_each_and_messages_are_hardly_more_than_adamws(
    ranks: Launcher, stage: int, world: int
) -> None:
    plain = ranks(world)(figures, stage, "")
    for layout in ("slices", "whole"):
        ours = ranks(world)(figures, stage, layout)
        matrices, all_elements = ours[0][2], ours[0][3]
        wanted = (4 * matrices + 8 * (all_elements - matrices)) / world
        for (nbytes, sent, *_), (_, plainly, *_) in zip(ours, plain, strict=True):
            assert nbytes["optimizer"] <= 1.02 * wanted, layout
            assert sent <= 1.10 * plainly, layout


# ------------------------------------------------------------------------------------- checkpoints


def run(training: str, stage: int, path: str, steps: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Steps from a checkpoint on (or from the beginning), then a save."""
    model = net()
    engine = ZeroEngine(model, {"stage": stage, "units": {"min_numel": 0}, "fused_optimizers": False, **MUON})
    matrices, others = split(model)
    muon, adamw = Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, foreach=False)
    engine.attach(muon, adamw)
    engine.average_weights(0.5)
    if training == "resumed":
        engine.load(path)
    for number in range(*steps):
        rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(number))
        loss_of(model(rows)).backward()  # the same on all ranks
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    if training == "first":
        engine.save(path)
    found = engine.full_state_dict(), engine.optimizer_state_dict(muon)
    engine.close()
    return found


@pytest.mark.parametrize("stage, world", [(1, 1), (2, 3), (3, 4)])
def test_matrix_optimizers_checkpoint_goes_on_at_any_stage_and_number_of_ranks(
    ranks: Launcher, tmp_path: Path, stage: int, world: int
) -> None:
    path = str(tmp_path / "c")
    weights, state = ranks(2)(run, "first", 3, path, (0, 3))[0]
    plain = net()
    plain.load_state_dict(weights)
    Muon(split(plain)[0], lr=0.02).load_state_dict(state)  # plain torch's takes it
    for found, loaded in ranks(world)(run, "resumed", stage, path, (3, 3)):
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        moments = [[each["state"][n]["momentum_buffer"] for n in (0, 5)] for each in (loaded, state)]
        assert all(map(torch.equal, *moments))
    wanted, _ = ranks(2)(run, "whole", 2, path, (0, 5))[0]
    for found, _ in ranks(world)(run, "resumed", stage, path, (3, 5)):
        assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


# ------------------------------------------------------------------------------------- refusals


def refused() -> list[str]:
    said = []
    model = net()
    declared = {"matrix_optimizers": ["Whitening"]}
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, lambda: Whitening(split(model)[0])),
        (declared, lambda: Whitening([*split(model)[0], model.stem.weight])),
        ({**declared, "matrix_parameters": ["*.up.weight"]}, lambda: Whitening(split(model)[0])),
        ({**declared, "offload": {"optimizer": "cpu"}}, lambda: Whitening(split(model)[0])),
    ]
    for options, make in cases:
        model = net()
        engine = ZeroEngine(model, {"stage": 2, "units": {"min_numel": 0}, **options})
        with pytest.raises((TypeError, ValueError)) as caught:
            engine.attach(make())
        said.append(str(caught.value))
        engine.close()
    return said


def test_what_cannot_be_is_refused_by_name_on_all_ranks(ranks: Launcher) -> None:
    for said in ranks(2)(refused):
        assert "matrix_optimizers=['Whitening']" in said[0]
        assert "'stem.weight' (6, 6) is divided among ranks" in said[1] and "AdamW" in said[1]
        assert "'blocks.0.down.weight'" in said[2] and "['*.up.weight']" in said[2]
        assert "offload.optimizer" in said[3] and "Whitening" in said[3]


def test_groups_are_made_by_shape_and_place() -> None:
    model = net()
    found = split_matrices(model, units=UnitsConfig(min_numel=0))
    assert list(found.named_matrices) == [n for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n]
    assert {*map(id, found.matrices), *map(id, found.others)} == {id(p) for p in model.parameters()}
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(list(model.parameters())) and "blocks.0.up.weight" in lines[1]
    assert list(split_matrices(model, ["stem.*"]).named_matrices) == ["stem.weight"]
    with pytest.raises(ValueError, match=r"'nothing\.\*' matches no trained matrix"):
        split_matrices(model, ["nothing.*"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_matrix_has_an_owner_and_owners_have_like_shares(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orthogonaliser, "_ROUND_NUMEL", 20_000)
    random = torch.Generator().manual_seed(ranks)
    for _ in range(100):
        shapes = torch.randint(1, 300, (int(torch.randint(1, 40, (), generator=random)), 2), generator=random).tolist()
        numel = sum(rows * columns for rows, columns in shapes)
        ends = [numel * rank // ranks for rank in range(ranks + 1)]  # slices of all of them, one after the other
        matrices, at = list[Matrix](), 0
        for rows, columns in shapes:
            held = [max(0, min(at + rows * columns, ends[r + 1]) - max(at, ends[r])) for r in range(ranks)]
            matrices.append(Matrix(nn.Parameter(torch.empty(0)), {}, (rows, columns), tuple(held)))
            at += rows * columns
        found = owners(matrices, ranks)
        loads = [
            sum(m.cost for m, owner in zip(matrices, found, strict=True) if owner == rank) for rank in range(ranks)
        ]
        mean, most = sum(loads) / ranks, max(m.cost for m in matrices)
        assert max(loads) <= max(1.1 * mean, mean + most)
        in_rounds = rounds(matrices, found, ranks)
        assert sorted(position for one in in_rounds for position in one) == list(range(len(matrices)))
        done = [0] * ranks
        for number, one in enumerate(in_rounds, 1):  # nobody has much more in a round than others
            for position in one:
                done[found[position]] += matrices[position].cost
            assert max(done) <= max(loads) * number / len(in_rounds) + 2 * most
        moved = sum(m.held[r] for m, owner in zip(matrices, found, strict=True) for r in range(ranks) if r != owner)
        assert ranks > 1 or not moved


def shared_buckets(stage: int, layout: dict[str, Any], one: bool) -> list[str]:
    """Warnings of a first step of Muon and AdamW."""
    model = net()
    engine = ZeroEngine(model, {"stage": stage, **layout})
    found = split_matrices(model)
    optimizers = [MuonAdamW(found)] if one else [Muon(found.matrices), torch.optim.AdamW(found.others)]
    engine.attach(*optimizers)
    loss_of(model(torch.ones(2, 6))).backward()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for optimizer in optimizers:
            optimizer.step()
    engine.close()
    return [str(each.message) for each in told if "share buckets" in str(each.message)]


def test_two_optimizers_that_share_buckets_are_told_so_once_on_one_rank(ranks: Launcher) -> None:
    said = ranks(2)(shared_buckets, 2, {}, False)
    assert len(said[0]) == 1 and "MuonAdamW" in said[0][0] and "matrix_parameters" in said[0][0] and not said[1]
    for stage, layout, one in ((3, {}, False), (1, {"matrix_parameters": ["blocks.*"]}, False), (1, {}, True)):
        assert not any(ranks(2)(shared_buckets, stage, layout, one))


@pytest.mark.parametrize("slices", [2, 3, 4, 8])
def test_packing_keeps_whole_what_is_to_stay_whole(slices: int) -> None:
    random = torch.Generator().manual_seed(slices)
    for number in range(200):
        count = int(torch.randint(1, 12, (), generator=random))
        sizes = [32 * int(n) for n in torch.randint(1, 60, (count,), generator=random)]
        placed, length = pack(sizes, slices, 64, number)
        assert sorted(position for position, _ in placed) == list(range(count)) and length % 64 == 0
        ends = [(at, at + sizes[position], position) for position, at in placed]
        assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(ends)) and ends[-1][1] <= slices * length
        assert all(begin // length == (end - 1) // length for begin, end, _ in ends)
        assert length <= sum(sizes) / slices + max(sizes) + 64


# ------------------------------------------------------------------------------------- state of any form


class Factored(Optimizer):
    """Scales rows and columns of matrices by roots of sums of squares, as SOAP and Shampoo keep their factors."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    factors = [p.new_zeros(size, size) for size in (p.shape if p.dim() == 2 else ())]
                    state |= {"step": 0, "factors": factors, "pair": (0.5, None)}
                state["step"] += 1
                update = p.grad
                if p.dim() == 2:
                    left, right = state["factors"]
                    left.add_(p.grad @ p.grad.T), right.add_(p.grad.T @ p.grad)
                    update = update / left.diagonal().sqrt().add(0.1)[:, None] / right.diagonal().sqrt().add(0.1)
                p.sub_(update / (1 + update.norm()), alpha=group["lr"])


KINDS: dict[str, Any] = {
    "Factored": Factored,
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
}


def steps_with(
    kind: str, stage: int, path: str, do: str, bounds: tuple[int, int]
) -> list[tuple[dict[str, Tensor], Any]]:
    """Steps with all parameters in an optimizer of whole tensors, from a checkpoint on, and a save.

    Returns:
        Weights and state after the steps; before that, those that `load` brought.
    """
    model = net()
    options = {"matrix_optimizers": [kind], "matrix_parameters": ["*"]} if stage else {}
    engine = ZeroEngine(model, {"stage": stage, "units": {"min_numel": 0}, **options})
    optimizer = KINDS[kind](list(model.parameters()))
    engine.attach(optimizer)
    if "load" in do:
        engine.load(path)
    if "torch" in do:
        engine.load_optimizer_state_dict(optimizer, torch.load(f"{path}.pt"))
        model.load_state_dict(torch.load(f"{path}.weights.pt"))
    found = [(engine.full_state_dict(), engine.optimizer_state_dict(optimizer))] if do == "load" else []
    for number in range(*bounds):
        rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(number))
        loss_of(model(rows)).backward()  # the same on all ranks
        optimizer.step()
        optimizer.zero_grad()
    found.append((engine.full_state_dict(), engine.optimizer_state_dict(optimizer)))
    if "save" in do:
        engine.save(path)
        if dist.get_rank() == 0:
            torch.save(found[-1][1], f"{path}.pt")
            torch.save(found[-1][0], f"{path}.weights.pt")
    engine.close()
    return found


def in_one_process(kind: str, steps: int) -> tuple[dict[str, Tensor], Any]:
    model = net()
    optimizer = KINDS[kind](list(model.parameters()))
    for number in range(steps):
        loss_of(model(torch.randn(12, 6, generator=torch.Generator().manual_seed(number)))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict()), optimizer.state_dict()


def same_state(found: Any, wanted: Any) -> bool:
    """Equal in values, dtypes, shapes, and kinds of containers."""
    if isinstance(wanted, Tensor):
        return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same_state(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, (list, tuple)):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(same_state, found, wanted))
    return bool(found == wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage, world, saved", [(3, 2, 2), (2, 4, 0), (0, 2, 3), (1, 1, 1)])
def test_state_that_is_not_per_element_is_saved_and_loaded(
    ranks: Launcher, tmp_path: Path, kind: str, stage: int, world: int, saved: int
) -> None:
    path = str(tmp_path / "c")
    wanted, last = in_one_process(kind, 3), in_one_process(kind, 5)
    for ((weights, state),) in ranks(2)(steps_with, kind, saved, path, "save", (0, 3)):
        assert same_state(weights, wanted[0]) and same_state(state["state"], wanted[1]["state"])
    for do, expected in (("load", [wanted, last]), ("torch", [last])):
        for found in ranks(world)(steps_with, kind, stage, path, do, (3, 5)):
            for (weights, state), (its_weights, its_state) in zip(found, expected, strict=True):
                assert same_state(weights, its_weights) and same_state(state["state"], its_state["state"])


def test_such_state_is_converted_to_torchs_and_back(ranks: Launcher, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    ranks(2)(steps_with, "Factored", 3, path, "save", (0, 3))
    wanted = in_one_process("Factored", 3)[1]["state"]
    convert(path, tmp_path / "file.pt", to_format="torch")
    stored = torch.load(tmp_path / "file.pt", weights_only=True)
    assert same_state(stored["optimizers"][0]["state"], wanted)
    convert(tmp_path / "file.pt", tmp_path / "again")
    for (_, state), _ in ranks(2)(steps_with, "Factored", 2, str(tmp_path / "again"), "load", (3, 3)):
        assert same_state(state["state"], wanted)


def test_state_of_an_elementwise_optimizer_has_the_parameters_shapes(tmp_path: Path) -> None:
    for width in (6, 8):
        model = net(width=width)
        engine = ZeroEngine(model, {"stage": 2})
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        engine.attach(optimizer)
        if width == 6:
            loss_of(model(torch.ones(2, 6))).backward()
            optimizer.step()
            engine.save(tmp_path / "c")
        else:
            with pytest.raises(ValueError, match=r"has shape \(6, 6\) in the checkpoint and \(8, 8\) in the model"):
                engine.load_optimizers(CheckpointReader(tmp_path / "c"))
        engine.close()


def vectors() -> str:
    model = net()
    engine = ZeroEngine(model, {"stage": 2, "matrix_optimizers": ["Adafactor"], "matrix_parameters": ["*weight"]})
    with pytest.raises(ValueError, match="tried on a vector") as refused:
        engine.attach(torch.optim.Adafactor(model.parameters(), lr=0.02))
    return str(refused.value)


def test_vectors_of_a_class_that_needs_them_whole_are_refused_unless_they_are(ranks: Launcher) -> None:
    assert all(
        "'stem.bias' (6,) is divided among ranks" in text and "'*' for all" in text for text in ranks(2)(vectors)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_have_the_bits_of_single_matrices(dtype: torch.dtype) -> None:
    group = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]).param_groups[0]
    other = {**group, "ns_steps": 3}
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 12), (12, 6), (6, 12), (40, 40), (12, 6), (6, 12)]
    matrices = [(torch.randn(shape, generator=generator).to(dtype), group) for shape in shapes]
    matrices.append((matrices[0][0].clone(), other))
    wanted = [muon.newton_schulz(matrix.clone(), each) for matrix, each in matrices]
    assert all(map(torch.equal, muon.newton_schulz_all(matrices), wanted))
