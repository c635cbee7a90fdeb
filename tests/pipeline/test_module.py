"""A model in stages: what is built, what it is called, what it computes. The oracle is an nn.Sequential."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections import OrderedDict
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.launcher import Launcher, RankError
from tests.pipeline.layers import WIDTH, Block, Wide, double, specs, tied_specs, words
from zero_strategy.pipeline.building import LayerSpec, ModelLayer, TiedLayerSpec
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.topology import PipeModelDataParallelTopology, ProcessTopology


def stages_of(layers: Any, stages: int, **options: Any) -> list[PipelineModule]:
    """All ranks' parts, each made as its process would, from the same seed."""
    parts = []
    for rank in range(stages):
        torch.manual_seed(7)
        given = layers() if isinstance(layers, FunctionType) else layers
        parts.append(PipelineModule(given, stages, rank=rank, **options))
    return parts


def run(parts: list[PipelineModule], inputs: Any) -> Any:
    for stage in range(parts[0].placement.stages):
        part = parts[parts[0].placement.rank_of(stage)]
        inputs = part.chunk_functions()[parts[0].placement.chunk_of(stage)](inputs)
    return inputs


def whole_state(parts: list[PipelineModule]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.state_dict().items():
            assert name not in state or torch.equal(state[name], value), name
            state[name] = value
    return state


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert sorted(first) == sorted(second)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


# ---- what is built ----


def test_only_a_stage_s_own_layers_are_built() -> None:
    for rank, built in ((0, 2), (1, 1), (2, 2)):
        log: list[str] = []
        part = PipelineModule(specs(5, log), 3, partition_method=[0, 2, 3, 5], rank=rank)
        assert log == ["cpu"] * built == ["cpu"] * len(part.forward_funcs)


def test_counting_parameters_takes_no_memory() -> None:
    log: list[str] = []
    part = PipelineModule(specs(5, log), 5, partition_method="parameters", rank=3)
    assert log == ["meta", "cpu"] and part.parts == [0, 1, 2, 3, 4, 5]  # equal specs are counted once


class ReadsValues(nn.Linear):
    """Cannot be built without values."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.largest = self.weight.max().item()


def test_layers_that_cannot_be_on_the_meta_device_are_counted_all_the_same() -> None:
    layers = [LayerSpec(ReadsValues, 8), LayerSpec(ReadsValues, 2), LayerSpec(ReadsValues, 7)]
    assert PipelineModule(layers, 2, rank=0).parts == [0, 1, 3]


@pytest.mark.parametrize("layers", [specs, tied_specs])
@pytest.mark.parametrize("seed_layers", [False, True])
def test_initial_weights_do_not_depend_on_the_stages(layers: Any, seed_layers: bool) -> None:
    states = [whole_state(stages_of(layers, stages, seed_layers=seed_layers)) for stages in (1, 2, 4)]
    states.append(whole_state(stages_of(layers, 2, chunks=2, placement="v", seed_layers=seed_layers)))
    for state in states[1:]:
        assert_same(state, states[0])


def test_the_script_s_seed_decides_unless_layers_have_their_own() -> None:
    def state(seed: int, **options: Any) -> Tensor:
        torch.manual_seed(seed)
        return PipelineModule(specs(1), 1, **options).state_dict()["0.linear.weight"]

    assert torch.equal(state(1), state(1)) and not torch.equal(state(1), state(2))
    assert not torch.equal(state(1), state(1, base_seed=5))
    assert torch.equal(state(1, seed_layers=True), state(2, seed_layers=True))
    found = state(1, seed_layers=True)
    torch.manual_seed(1234)  # DeepSpeed: base_seed + number of the layer
    assert torch.equal(found, Block(WIDTH).linear.weight)


def test_two_modules_under_one_seed_differ() -> None:
    torch.manual_seed(3)
    first, second = PipelineModule(specs(1), 1), PipelineModule(specs(1), 1)
    assert not torch.equal(first.state_dict()["0.linear.weight"], second.state_dict()["0.linear.weight"])


@pytest.mark.parametrize("seed_layers", [False, True])
def test_what_a_script_draws_next_does_not_depend_on_the_stage(seed_layers: bool) -> None:
    drawn = []
    for stages, rank in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        PipelineModule(specs(4), stages, rank=rank, seed_layers=seed_layers)
        drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1] == drawn[2]


def test_a_seed_function_of_the_script() -> None:
    seeds: list[int] = []

    def seed(number: int) -> None:
        seeds.append(number)
        torch.manual_seed(number)

    PipelineModule(specs(3), 1, seed_layers=True, seed_fn=seed, base_seed=10)
    assert seeds == [10, 11, 12]


def test_other_stages_modules_are_let_go() -> None:
    layers: list[Any] = [Block(WIDTH), ModelLayer({"b": Block(WIDTH)}), Block(WIDTH)]
    others = [weakref.ref(layers[0]), weakref.ref(layers[1].modules["b"])]
    part = PipelineModule(layers, 3, rank=2)
    del layers
    gc.collect()
    assert [other() for other in others] == [None, None] and len(part.forward_funcs) == 1


class Failing(Block):
    """Cannot be built for real."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        if self.linear.weight.device.type != "meta":
            raise ArithmeticError("no room")


def build_on_two(kind: str) -> None:
    rank = torch.distributed.get_rank()
    last = {"failing": Failing, "different": (Block, Wide)[rank]}.get(kind, Block)
    arguments = (WIDTH, 2) if last is Wide else (WIDTH,)
    PipelineModule([*specs(1), LayerSpec(last, *arguments)], 2, partition_method="uniform")


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("failing", r"failed on other rank\(s\): \{1: 'ArithmeticError: no room'\}", "ArithmeticError: no room"),
        ("different", r"ranks have different models: rank 1 has", r"ranks have different models: rank 0 has"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(ranks: Launcher, kind: str, first: str, second: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2)(build_on_two, kind)
    failures = caught.value.failures
    assert re.search(first, failures[0].text) and re.search(second, failures[1].text)


# ---- what it is called ----


def test_a_list_is_named_as_its_sequential() -> None:
    layers = [Block(WIDTH), double, nn.Tanh(), Block(WIDTH)]
    part = PipelineModule(layers, 2, rank=1, partition_method="uniform")
    assert sorted(part.state_dict()) == ["3.linear.bias", "3.linear.weight"] and part.layer_names() == ["2", "3"]
    whole = PipelineModule(layers, 1)
    assert list(whole.state_dict()) == list(nn.Sequential(layers[0], nn.Identity(), *layers[2:]).state_dict())


def test_a_sequential_keeps_its_names() -> None:
    body = nn.Sequential(Block(WIDTH))
    sequential = nn.Sequential(OrderedDict(embed=nn.Linear(2, WIDTH), body=body, head=Block(WIDTH)))
    state = sequential.state_dict()
    parts = stages_of(sequential, 3)
    assert [part.layer_names() for part in parts] == [["embed"], ["body"], ["head"]]
    assert_same(whole_state(parts), dict(state))
    assert parts[0].embed is sequential.embed


def test_modules_of_a_model_keep_their_names() -> None:
    model = nn.ModuleDict({"h": nn.ModuleList([Block(WIDTH), Block(WIDTH)]), "norm": nn.LayerNorm(WIDTH)})
    layers = [
        ModelLayer({"model.h.0": model["h"][0]}),  # type: ignore[index]
        ModelLayer({"model.h.1": model["h"][1], "model.norm": model["norm"]}),  # type: ignore[index]
    ]
    parts = stages_of(layers, 2)
    assert sorted(parts[1].state_dict()) == sorted(
        f"model.{name}" for name in model.state_dict() if name.startswith(("h.1", "norm"))
    )
    x = torch.randn(2, WIDTH)
    assert torch.equal(run(parts, x), model["norm"](model["h"][1](model["h"][0](x))))  # type: ignore[index]
    assert parts[0].layer_classes == ["Block", "Block+LayerNorm"]


def test_names_of_units() -> None:
    part = PipelineModule(tied_specs(), 1)
    assert part.layer_names() == ["tied_modules.embed", "1", "3", "4"] and part.unit_names() == ["1", "3", "4"]
    first = PipelineModule(tied_specs(), 2, partition_method=[0, 3, 6], rank=0)
    assert first.unit_names() == ["tied_modules.embed", "1"]


def test_names_that_the_module_uses_itself() -> None:
    for name in ("ties", "parts", "stages", "topology"):
        with pytest.raises(ValueError, match=f"cannot be called '{name}' in a PipelineModule"):
            PipelineModule(nn.Sequential(OrderedDict({name: nn.ReLU()})), 1)


# ---- what it computes ----


@pytest.mark.parametrize(("stages", "options"), [(1, {}), (2, {}), (4, {}), (2, {"chunks": 2}), (1, {"chunks": 3})])
def test_the_forward_is_layer_after_layer(stages: int, options: dict[str, Any]) -> None:
    parts = stages_of(tied_specs, stages, **options)
    whole = stages_of(tied_specs, 1)[0]
    assert torch.equal(run(parts, words()), whole(words()))
    state = whole.state_dict()
    embedding = state["tied_modules.embed.weight"]
    x = torch.nn.functional.embedding(words(), embedding)
    for index in (1, 3, 4):
        block = Wide(WIDTH, max(1, index - 1))
        block.load_state_dict({k[2:]: v for k, v in state.items() if k.startswith(f"{index}.")})
        x = block(x) if index != 1 else double(block(x))
    assert torch.equal(whole(words()), x @ embedding.t())


def test_a_rank_with_all_chunks_runs_the_whole() -> None:
    one, chunked = stages_of(tied_specs, 1)[0], stages_of(tied_specs, 1, chunks=3)[0]
    assert chunked.parts != one.parts and torch.equal(one(words()), chunked(words()))


def test_chunks_of_a_rank() -> None:
    loop, v = stages_of(specs, 2, chunks=2), stages_of(specs, 2, chunks=2, placement="v")
    assert [part.stages for part in loop] == [[0, 2], [1, 3]] and [part.stages for part in v] == [[0, 3], [1, 2]]
    assert loop[1].local_layers == [1, 3] and v[0].local_layers == [0, 3]
    x = torch.randn(2, WIDTH)
    assert torch.equal(run(loop, x), run(v, x))
    with pytest.raises(ValueError, match="this rank has 2 chunks"):
        loop[0](x)
    with pytest.raises(ValueError, match="chunk 2 is not one of this rank's 2 chunks"):
        loop[0].forward_chunk(2, x)


def test_hooks_on_the_module_see_chunks() -> None:
    part = PipelineModule(specs(2), 1)
    seen: list[Any] = []
    part.register_forward_hook(lambda module, args, output: seen.append(output))
    output = part.forward_chunk(0, torch.ones(1, WIDTH))
    assert seen[0] is output


def test_forwards_with_seeds_of_their_own() -> None:
    def dropped(stages: int) -> Tensor:
        layers = [nn.Dropout(0.5), double, nn.Dropout(0.5)]
        parts = stages_of(layers, stages, seed_layers=True, partition_method="uniform")
        torch.manual_seed(stages)  # without influence
        return torch.stack([run(parts, torch.ones(40)) for _ in range(2)])

    found = dropped(1)
    assert torch.equal(found, dropped(2)) and torch.equal(found, dropped(3)) and not torch.equal(*found)
    torch.manual_seed(1234 * 2)  # DeepSpeed: base_seed x (forwards so far + 2) + number of the layer
    kept = torch.nn.functional.dropout(torch.ones(40), 0.5)
    torch.manual_seed(1234 * 2 + 2)
    assert torch.equal(found[0], torch.nn.functional.dropout(2 * kept, 0.5))


def pair(values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return values[1], torch.sin(values[0])


def calls_and_gradients(**options: Any) -> tuple[list[int], list[Tensor]]:
    calls: list[int] = []
    torch.manual_seed(0)
    part = PipelineModule([*specs(3), nn.Tanh(), double], 1, **options)
    for index in range(3):
        part.get_submodule(f"{index}.linear").register_forward_hook(lambda *_, index=index: calls.append(index))
    x = torch.ones(2, WIDTH, requires_grad=True)
    part(x).sum().backward()
    assert x.grad is not None
    return calls, [x.grad, *(p.grad for p in part.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({"activation_checkpoint_interval": 1}, [2, 1, 0]),
        ({"activation_checkpoint_interval": 2}, [2, 0, 1]),
        ({"activation_checkpoint_interval": 2, "checkpointable_layers": ["Block"]}, [0, 1]),
        ({"activation_checkpoint_interval": 1, "checkpointable_layers": ["Linear"]}, []),
    ],
)
def test_layers_are_computed_again(options: dict[str, Any], again: list[int]) -> None:
    plain_calls, plain = calls_and_gradients()
    calls, gradients = calls_and_gradients(**options)
    assert plain_calls == [0, 1, 2] and calls == [0, 1, 2, *again]
    assert len(plain) == 7 and all(torch.equal(a, b) for a, b in zip(plain, gradients))


def test_checkpoint_functions_get_the_members_of_a_tuple() -> None:
    seen: list[int] = []

    def keep(function: Any, *inputs: Any) -> Any:
        seen.append(len(inputs))
        return function(*inputs)

    layers = [nn.Identity(), pair]
    part = PipelineModule(layers, 1, activation_checkpoint_func=keep, checkpointable_layers=["Identity", "pair"])
    part.set_checkpoint_interval(1)
    first, second = torch.ones(2), torch.zeros(3)
    found = part((first, second))
    assert found[0] is second and torch.equal(found[1], torch.sin(first)) and seen == [2, 2]
    with pytest.raises(ValueError, match="activation_checkpoint_interval -1"):
        part.set_checkpoint_interval(-1)


def test_layers_can_be_compiled() -> None:
    part = stages_of(tied_specs, 1)[0]
    expected = part(words())
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    part.compile(backend=backend)
    assert torch.equal(part(words()), expected) and len(graphs) >= 3
    assert part.get_additional_losses() is None


def layer_of(kind: str, index: int) -> Any:
    if kind == "tied":
        return TiedLayerSpec("t", Wide, WIDTH, 1)
    if kind == "other":
        return TiedLayerSpec("u", nn.Linear, WIDTH, WIDTH, forward_fn=lambda module, x: x @ module.weight)
    return {"function": double, "norm": LayerSpec(nn.LayerNorm, WIDTH)}.get(kind, LayerSpec(Wide, WIDTH, 1 + index % 3))


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(["wide", "tied", "other", "function", "norm"]), min_size=1, max_size=9),
    st.sampled_from(["uniform", "parameters"]),
    st.data(),
)
def test_any_division_is_the_same_model(kinds: list[str], method: str, data: st.DataObject) -> None:
    def layers() -> list[Any]:
        return [layer_of(kind, index) for index, kind in enumerate(kinds)]

    stages = data.draw(st.integers(1, len(kinds)))
    chunks = data.draw(st.integers(1, len(kinds) // stages))
    shape = "v" if chunks == 2 and data.draw(st.booleans()) else "loop"
    whole = stages_of(layers, 1)[0]
    parts = stages_of(layers, stages, chunks=chunks, placement=shape, partition_method=method)
    assert_same(whole_state(parts), whole.state_dict())
    x = torch.linspace(-1, 1, WIDTH)
    assert torch.equal(run(parts, x), whole(x))
    indices = sorted(index for part in parts for index in part.local_layers)
    assert indices == list(range(len(kinds)))
    for key in ("t", "u"):
        holders = [part.stage_id for part in parts if key in part.tied_modules]
        tied = [part.stage_id for part in parts if any(tie.key == key for tie in part.ties)]
        assert tied == (holders if len(holders) > 1 else [])


# ---- how it is divided ----


def test_methods() -> None:
    layers = [*specs(2), double, LayerSpec(Wide, WIDTH, 4), nn.Tanh(), *specs(1)]
    found = {
        method: PipelineModule(layers, 2, partition_method=method, rank=0).parts
        for method in ("uniform", "parameters", "type:^BLOCK", "type:wide|tanh")
    }
    assert found["uniform"] == [0, 3, 6] and found["parameters"] == [0, 3, 6]
    assert found["type:^BLOCK"] == [0, 3, 6] and found["type:wide|tanh"] == [0, 4, 6]
    assert PipelineModule(layers, 2, partition_method=(0, 1, 6), rank=1).local_layers == [1, 2, 3, 4, 5]


def test_frozen_parameters_do_not_count() -> None:
    layers = [Block(WIDTH) for _ in range(4)]
    layers[0].requires_grad_(False)
    layers[1].requires_grad_(False)
    assert PipelineModule(layers, 2, rank=0).parts == [0, 3, 4]


def test_where_layers_are() -> None:
    part = PipelineModule(specs(7), 3, partition_method="uniform", rank=1)
    assert [part.stage_owner(layer) for layer in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert part.partitions() == [0, 3, 5, 7] and part.num_pipeline_stages() == 3 and part.stage_id == 1
    assert part.topology().get_dim("pipe") == 3 and part.mpu().get_pipe_parallel_rank() == 1
    assert part.describe().splitlines()[1] == "stage 1 on rank 1: layers 3 to 4: Block, Block"
    with pytest.raises(ValueError, match="layer 7 is not one of 7"):
        part.stage_owner(7)


def test_pipeline_module_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="needs num_stages or topology"):
        PipelineModule(specs(2))
    with pytest.raises(ValueError, match="num_stages 2 does not divide the 1 ranks"):
        PipelineModule(specs(2), 2)
    with pytest.raises(ValueError, match="2 layers cannot be divided into 3 stages"):
        PipelineModule(specs(2), 3, rank=0)
    with pytest.raises(ValueError, match="5 layers cannot be divided into 6 stages"):
        PipelineModule(specs(5), 3, chunks=2, rank=0)
    with pytest.raises(ValueError, match=r"no axis 'pipe'"):
        PipelineModule(specs(2), topology=ProcessTopology(["data"], [1]))
    with pytest.raises(ValueError, match="num_stages is 3, but the topology"):
        PipelineModule(specs(4), 3, PipeModelDataParallelTopology(2, 1, 1), rank=0)
    with pytest.raises(ValueError, match="partition_method 'best' is unknown"):
        PipelineModule(specs(2), 1, partition_method="best")
    with pytest.raises(ValueError, match="matches no layer; classes of the layers: Block"):
        PipelineModule(specs(2), 1, partition_method="type:Attention")
    with pytest.raises(TypeError, match="layer 1 is a int"):
        PipelineModule([double, 3], 1)
    with pytest.raises(TypeError, match="takes layers in their order"):
        PipelineModule(Block(3), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no layers"):
        PipelineModule([], 1)
    with pytest.raises(TypeError, match="checkpointable_layers takes a list"):
        PipelineModule(specs(1), 1, checkpointable_layers="Block")
    with pytest.raises(ValueError, match=r"tied_weight_attr 'weights' is no parameter of Embedding"):
        PipelineModule([TiedLayerSpec("a", nn.Embedding, 2, 2, tied_weight_attr="weights")], 1)
    with pytest.raises(ValueError, match="layers 0 and 1 are tied as 'a', but one is a Embedding"):
        PipelineModule([TiedLayerSpec("a", nn.Embedding, 2, 2), TiedLayerSpec("a", nn.Linear, 2, 2)], 1)
