"""Weights that several ranks hold stay one weight; the oracle is the model in one process."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.launcher import Launcher
from tests.pipeline.layers import WIDTH, WORDS, Block, logits, tied_specs, words
from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.topology import PipeDataParallelTopology


class Head(nn.Module):
    """Logits by a weight that may be an embedding's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WORDS)
        self.projection.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x)


def shared_sequential() -> nn.Sequential:
    torch.manual_seed(4)
    embedding = nn.Embedding(WORDS, WIDTH)
    return nn.Sequential(OrderedDict(embed=embedding, body=Block(WIDTH), head=Head(embedding.weight)))


def test_who_holds_what() -> None:
    parts = [PipelineModule(tied_specs(), 3, partition_method=[0, 2, 4, 6], rank=rank) for rank in range(3)]
    assert [[tie.key for tie in part.ties] for part in parts] == [["embed"], [], ["embed"]]
    tie = parts[2].ties[0]
    assert (tie.stages, tie.owner_stage, tie.ranks, tie.owner_rank, tie.is_owner) == ((0, 2), 0, (0, 2), 0, False)
    assert parts[0].ties[0].is_owner and list(tie.weights) == ["tied_modules.embed.weight"]
    assert tie.weights["tied_modules.embed.weight"] is parts[2].tied_modules["embed"].weight
    with pytest.raises(ValueError, match=r"'embed' are held by ranks \[0, 2\], and there is no process group"):
        parts[0].allreduce_tied_weight_gradients()


def test_ties_of_one_rank_are_none() -> None:
    assert PipelineModule(tied_specs(), 1).ties == []
    v = PipelineModule(tied_specs(), 2, chunks=2, placement="v", rank=0)
    assert v.stages == [0, 3] and v.ties == [] and len(dict(v.named_parameters())) == 1 + 6 * 1
    loop = PipelineModule(tied_specs(), 2, chunks=2, rank=1)
    assert loop.stages == [1, 3] and loop.ties[0].owner_rank == 0


def test_parameters_that_layers_share_are_found() -> None:
    parts = [PipelineModule(shared_sequential(), 3, rank=rank) for rank in range(3)]
    assert [[tie.key for tie in part.ties] for part in parts] == [["embed.weight"], [], ["embed.weight"]]
    assert parts[2].ties[0].local_names == {"embed.weight": "head.projection.weight"}
    assert parts[2].ties[0].weights["embed.weight"] is parts[2].head.projection.weight
    assert PipelineModule(shared_sequential(), 2, partition_method=[0, 1, 3], rank=1).ties[0].ranks == (0, 1)


class Biased(nn.Embedding):
    """An embedding whose bias only its first use needs."""

    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


def model(kind: str) -> Any:
    if kind == "shared":
        return shared_sequential()
    if kind == "partly":
        head = TiedLayerSpec("embed", Biased, forward_fn=logits)
        return [TiedLayerSpec("embed", Biased), LayerSpec(Block, WIDTH), head]
    return tied_specs(1)


def forward_backward(kind: str, stages: int) -> dict[str, Tensor]:
    """One micro-batch through the stages by hand; gradients by their names in the whole model."""
    torch.manual_seed(11 + dist.get_rank() if dist.is_initialized() else 11)  # the first rank's seed decides
    part = PipelineModule(model(kind), stages, partition_method="uniform")
    grid, inputs = part.mpu(), words()
    received = inputs
    if not grid.is_first_stage:
        received = torch.empty(3, 4, WIDTH)
        dist.recv(received, grid.stage_to_global(grid.stage_id - 1))
        received.requires_grad_()
    output = part(received)
    if grid.is_last_stage:
        nn.functional.cross_entropy(output.flatten(0, 1), inputs.flatten()).backward()
    else:
        after = grid.stage_to_global(grid.stage_id + 1)
        dist.send(output.detach(), after)
        gradient = torch.empty_like(output)
        dist.recv(gradient, after)
        output.backward(gradient)
    if not grid.is_first_stage:
        assert received.grad is not None
        dist.send(received.grad, grid.stage_to_global(grid.stage_id - 1))
    part.allreduce_tied_weight_gradients()
    return {name: p.grad for name, p in part.named_parameters(remove_duplicate=False) if p.grad is not None}


@pytest.mark.parametrize("kind", ["specs", "shared", "partly"])
@pytest.mark.parametrize("stages", [2, 3])
def test_gradients_are_those_of_one_process(ranks: Launcher, kind: str, stages: int) -> None:
    expected = forward_backward(kind, 1)
    parts = ranks(stages)(forward_backward, kind, stages)
    assert set().union(*parts) == set(expected)
    for part in parts:
        for name, gradient in part.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def copies() -> tuple[float, bool]:
    """Of a tied weight whose gradient is 2 ** rank: the sum, and whether nothing else has changed."""
    part = PipelineModule(tied_specs(), topology=PipeDataParallelTopology(2, 2), partition_method="uniform")
    weight, group = part.get_tied_weights_and_groups()[0]
    weight.grad = gradient = torch.full_like(weight, 2.0 ** dist.get_rank())
    part.allreduce_tied_weight_gradients()
    assert group is not None and dist.get_world_size(group) == 2
    others = [p.grad for p in part.parameters() if p is not weight]
    kept = gradient is weight.grad and torch.all(gradient == gradient[0, 0])
    return gradient[0, 0].item(), bool(kept) and not any(gradient is not None for gradient in others)


def test_gradients_of_pipelines_beside_each_other_stay_apart(ranks: Launcher) -> None:
    assert ranks(4)(copies) == [(5.0, True), (10.0, True), (5.0, True), (10.0, True)]  # ranks 0 and 2, 1 and 3


def weights_and_missing_gradients() -> tuple[Tensor, list[bool]]:
    torch.manual_seed(dist.get_rank())  # copies start from the owner's values even so
    part = PipelineModule(model("shared"), 3)
    if part.ties:
        with torch.no_grad():
            part.ties[0].weights["embed.weight"].add_(dist.get_rank())
    part.synchronize_tied_weights()
    part.allreduce_tied_weight_gradients()
    missing = [p.grad is None for p in part.parameters()]
    if part.ties and part.ties[0].is_owner:
        part.embed.weight.grad = torch.ones_like(part.embed.weight)
    part.allreduce_tied_weight_gradients()
    weights = [tie.weights["embed.weight"] for tie in part.ties]
    assert all(weight.grad is not None and torch.all(weight.grad == 1) for weight in weights)
    return (weights[0].detach() if weights else torch.zeros(0)), missing


def copied() -> list[bool]:
    torch.manual_seed(4)
    part = PipelineModule(tied_specs(), 2, partition_method="uniform")
    other = copy.deepcopy(part)
    x = words() if part.mpu().is_first_stage else torch.ones(2, WIDTH)
    weight = other.ties[0].weights["tied_modules.embed.weight"]
    found = [torch.equal(part(x), other(x)), weight is other.tied_modules["embed"].weight]
    found.append(not {id(p) for p in part.parameters()} & {id(p) for p in other.parameters()})
    weight.grad = torch.ones_like(weight)
    other.allreduce_tied_weight_gradients()
    return [*found, bool(torch.all(weight.grad == 2)), part.tied_modules["embed"].weight.grad is None]


def test_a_copy_is_tied_to_the_others_copies(ranks: Launcher) -> None:
    assert ranks(2)(copied) == [[True] * 5] * 2


def without_values() -> list[bool]:
    """True if parameters are left as they are that have no values yet, on the meta device or one for all elements."""
    with torch.device("meta"):
        meta = PipelineModule(shared_sequential(), 2)
    model = shared_sequential()
    hollow = torch.full((), float("nan")).expand(WORDS, WIDTH)
    torch.utils.swap_tensors(model.embed.weight, nn.Parameter(hollow))
    waiting = PipelineModule(model, 2)
    tie = waiting.ties[0]
    return [meta.ties[0].weights["embed.weight"].is_meta, not any(tie.weights["embed.weight"].stride())]


def test_what_has_no_values_yet_is_left_alone(ranks: Launcher) -> None:
    assert ranks(2)(without_values) == [[True, True]] * 2


def test_holders_agree_and_no_gradient_stays_none(ranks: Launcher) -> None:
    (first, *missing), (nothing, *_), (last, *_) = ranks(3)(weights_and_missing_gradients)
    assert torch.equal(first, shared_sequential().embed.weight) and torch.equal(first, last)
    assert nothing.numel() == 0 and missing == [[True]]
