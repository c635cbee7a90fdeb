"""Pipelines whose layers are divided among tensor-parallel ranks train what one process trains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from tests.launcher import Launcher
from tests.pipeline import test_engine as untensored
from tests.pipeline.test_engine import CLIP, STEPS, VOCABULARY, WIDTH, Block, Case, Found, batches, config_of, plain
from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.topology import PipeModelDataParallelTopology


def head(embedding: nn.Module, x: Tensor) -> Tensor:
    """Logits of the rows of the vocabulary that this rank has, brought together."""
    weight: Any = embedding.weight
    if not isinstance(weight, DTensor):
        return F.linear(x, weight)
    whole: Any = DTensor.from_local(x, weight.device_mesh, [Replicate()])
    out: Tensor = F.linear(whole, weight).redistribute(placements=[Replicate()]).to_local()  # type: ignore[attr-defined]
    return out


def layers(tied: bool) -> list[Any]:
    found = untensored.layers(tied)
    if tied:
        found[-1] = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head)
    return found


def divide(layer: nn.Module, name: str, mesh: Any) -> None:
    if isinstance(layer, Block):
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif isinstance(layer, nn.Embedding):
        parallelize_module(layer, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    elif isinstance(layer, nn.Linear):
        parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))


def begin(case: Case, tensor: int) -> tuple[PipelineModule, PipelineEngine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    topology = PipeModelDataParallelTopology(num_pp=case.stages, num_mp=tensor, num_dp=case.copies)
    parallelize = divide if tensor > 1 else None
    module = PipelineModule(
        layers(case.tied), topology=topology, loss_fn=untensored.loss_of, chunks=case.chunks, parallelize=parallelize
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    engine = PipelineEngine(module, config_of(case))
    engine.attach(optimizer)
    return module, engine, optimizer


def train(case: Case, folder: str | None) -> Found:
    module, engine, optimizer = begin(case, tensor=2)
    assert any(isinstance(parameter, DTensor) for parameter in module.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        copy = module.mpu().data_parallel_id
        losses.append(float(engine.forward_backward(batches(step, case.micro_batches, copy))))
        norms.append(float(engine.clip_grad_norm_(CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        engine.save(folder)
    return Found(losses, norms, engine.full_state_dict())


def train_cases(cases: list[tuple[Case, str | None]]) -> list[Found]:
    return [train(*case) for case in cases]


def load_and_save(case: Case, tensor: int, source: str, folder: str) -> None:
    _, engine, _ = begin(case, tensor)
    engine.load(source)
    engine.save(folder)


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


def test_stages_of_divided_layers(ranks: Launcher, tmp_path: Path) -> None:
    first = str(tmp_path / "first")
    cases: list[tuple[Case, str | None]] = [
        (Case(2, 1, 0), None),
        (Case(2, 1, 1, tied=False), None),
        (Case(2, 1, 2), None),
        (Case(2, 1, 3), first),
        (Case(2, 1, 3, "zb_h1", micro_batches=4), None),
        (Case(1, 2, 3), None),
    ]
    by_rank = ranks(4, timeout=180)(train_cases, cases)
    for number, (case, _) in enumerate(cases):
        expected = plain(case.copies, case.micro_batches, case.tied)
        for found in (results[number] for results in by_rank):
            assert found.losses == pytest.approx(expected.losses, rel=1e-6), case
            assert found.norms == pytest.approx(expected.norms, rel=1e-6), case
            assert found.weights.keys() == expected.weights.keys(), case
            for name, tensor in found.weights.items():
                torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-4, atol=1e-5, msg=f"{case} {name}")
    for number, (case, tensor) in enumerate([(Case(1, 1, 1), 1), (Case(1, 1, 2), 2), (Case(2, 1, 0), 2)]):
        folder = tmp_path / str(number)
        ranks(case.stages * tensor)(load_and_save, case, tensor, first, str(folder))
        assert tensor_files(folder) == tensor_files(Path(first)), (case, tensor)


def not_divided() -> None:
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    module = PipelineModule([LayerSpec(nn.Linear, 4, 4)], topology=topology)
    with pytest.raises(ValueError, match=r"model=2.*no parameter is divided: give PipelineModule parallelize"):
        PipelineEngine(module)
    module = PipelineModule([LayerSpec(nn.Linear, 4, 4)], topology=topology, parallelize=divide)
    with pytest.raises(ValueError, match=r"mesh.tensor is 1 .*2 rank\(s\) on its axis 'model'"):
        PipelineEngine(module, {"mesh": {"tensor": 1}})
    shared = nn.Linear(4, 4)
    other = nn.Linear(4, 4)
    other.weight = shared.weight
    plan = {"0": "colwise", "1": "rowwise"}
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' were one.*TiedLayerSpec"):
        PipelineModule(copy.deepcopy(nn.ModuleList([shared, other])), topology=topology, parallelize=plan)
    tied = PipelineModule([shared, other], topology=topology, parallelize=divide).get_parameter("0.weight")
    assert isinstance(tied, DTensor) and tied is shared.weight is other.weight
    with pytest.raises(ValueError, match=r"the PipelineModule's tp_plan for 0 is 'sideways'; accepted: colwise, "):
        PipelineModule([nn.Linear(4, 4)], topology=topology, parallelize={"0": "sideways"})


def local_outputs() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1)

    def keep(layer: nn.Module, name: str, mesh: Any) -> None:
        parallelize_module(layer, mesh, ColwiseParallel(use_local_output=False))

    module = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], topology=topology, parallelize=keep)
    engine = PipelineEngine(module)
    with pytest.raises(Exception, match=r"is a DTensor, which cannot be sent to another stage: .*use_local_output"):
        engine.evaluate([(torch.ones(1, 4), None)], 1)


def fails_alone(silent: int) -> str:
    """Error of a model that one rank cannot divide, while the other is in torch's collectives of the division."""
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)

    def refuse(layer: nn.Module, name: str, mesh: Any) -> None:
        if name == "1" and torch.distributed.get_rank() == silent:
            raise KeyError("no file of weights")
        divide(layer, name, mesh)

    try:
        PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], topology=topology, parallelize=refuse)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_cannot_divide_its_layers_is_not_waited_for(ranks: Launcher) -> None:
    """Within the bound of the test's ranks, a tenth of the group's."""
    for silent in (0, 1):
        found = ranks(2, timeout=120)(fails_alone, silent)
        assert found[silent] == "KeyError: 'no file of weights'"
        assert "layers cannot be divided" in found[1 - silent] and f'{silent}: "KeyError' in found[1 - silent]


def test_what_is_no_division(ranks: Launcher) -> None:
    ranks(2)(not_divided)
    ranks(2)(local_outputs)
