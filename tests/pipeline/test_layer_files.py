"""Weights as one file for each layer, whatever the stages: DeepSpeed 0.19.8's names and contents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.launcher import Launcher
from tests.pipeline.layers import WIDTH, WORDS, Block, double, logits, specs, tied_specs
from zero_strategy.pipeline.building import LayerSpec, ModelLayer, TiedLayerSpec
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.topology import PipeDataParallelTopology, PipeModelDataParallelTopology


def parts_of(layers: Any, stages: int, seed: int, **options: Any) -> list[PipelineModule]:
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    parts = []
    for rank in range(stages):
        torch.set_rng_state(state)
        parts.append(PipelineModule(layers(), stages, rank=rank, **options))
    return parts


def states(parts: list[PipelineModule]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.state_dict().items()}


def borrowed() -> list[Any]:
    """A tie of which no layer runs the module itself."""
    tie = {"forward_fn": logits}
    return [nn.Linear(WORDS, WIDTH), TiedLayerSpec("w", nn.Embedding, WORDS, WIDTH, **tie), *specs(1),
            TiedLayerSpec("w", nn.Embedding, WORDS, WIDTH, **tie)]  # fmt: skip


def named_modules() -> list[Any]:
    return [ModelLayer({"a.embed": nn.Embedding(WORDS, WIDTH), "a.norm": nn.BatchNorm1d(WIDTH)}), *specs(2)]


@pytest.mark.parametrize("layers", [specs, tied_specs, borrowed, named_modules])
@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (3, 1), (2, 3)])
def test_any_stages_load_what_any_stages_saved(tmp_path: Path, layers: Any, saved: int, loaded: int) -> None:
    before, after = parts_of(layers, saved, 1), parts_of(layers, loaded, 2)
    for part in before:
        part.save_state_dict(tmp_path)
    wanted = states(before)
    assert any(not torch.equal(value, wanted[name]) for name, value in states(after).items())
    for part in after:
        part.load_state_dir(tmp_path)
    found = states(after)
    assert sorted(found) == sorted(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_files_and_their_contents(tmp_path: Path) -> None:
    for part in parts_of(tied_specs, 2, 1):
        part.save_state_dict(tmp_path / "new")
    assert sorted(os.listdir(tmp_path / "new")) == [f"layer_{i:02d}-model_states.pt" for i in (0, 1, 3, 4)]
    state = torch.load(tmp_path / "new" / "layer_01-model_states.pt")
    assert list(state) == list(dict(LayerSpec(Block, WIDTH).build().state_dict())) + [
        f"inner.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")
    ]
    assert os.path.getsize(tmp_path / "new" / "layer_00-model_states.pt") < 4000


def test_modules_without_weights_have_a_file_and_functions_none(tmp_path: Path) -> None:
    PipelineModule([nn.Tanh(), double, nn.Linear(2, 2)], 1).save_state_dict(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["layer_00-model_states.pt", "layer_02-model_states.pt"]
    assert torch.load(tmp_path / "layer_00-model_states.pt") == {}


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    part = PipelineModule([layer], 1)
    part.save_state_dict(tmp_path, exclude_frozen_params=True)
    assert list(torch.load(tmp_path / "layer_00-model_states.pt")) == ["weight"]
    with pytest.raises(RuntimeError, match="bias"):
        part.load_state_dir(tmp_path)
    part.load_state_dir(tmp_path, strict=False)


def test_names_of_files() -> None:
    part = PipelineModule(specs(5), 2, partition_method=[0, 3, 5], rank=1)
    assert part.ckpt_layer_path("dir", 1) == "dir/layer_04-model_states.pt"
    assert part.ckpt_prefix("root", "step3") == "root/step3/module-pipe_01"
    sliced = PipelineModule(specs(5), topology=PipeModelDataParallelTopology(2, 2, 2), rank=7)
    assert sliced.ckpt_layer_path("dir", 0) == f"dir/layer_{sliced.local_layers[0]:02d}-model_01-model_states.pt"
    assert sliced.ckpt_prefix("root", 10) == "root/10/module-pipe_01-model_01"


def test_copies_share_the_writing(tmp_path: Path) -> None:
    topology = PipeDataParallelTopology(1, 2)
    for rank, (shared, number) in enumerate([(False, 3), (False, 0)]):
        part = PipelineModule(specs(3), topology=topology, rank=rank)
        part.checkpoint_parallel_write_pipeline = shared
        part.save_state_dict(tmp_path / f"{rank}")
        assert (len(os.listdir(tmp_path / f"{rank}")) if (tmp_path / f"{rank}").exists() else 0) == number
    for rank in range(2):
        part = PipelineModule(specs(3), topology=topology, rank=rank)
        part.checkpoint_parallel_write_pipeline = True
        part.save_state_dict(tmp_path / "both")
    assert len(os.listdir(tmp_path / "both")) == 3


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    part = PipelineModule(specs(2), 1)
    with pytest.raises(FileNotFoundError, match=r"no layer_00-\*model_states\.pt for layer 0 \(Block\)"):
        part.load_state_dir(tmp_path)
    PipelineModule(specs(2), topology=PipeModelDataParallelTopology(1, 2, 1), rank=0).save_state_dict(tmp_path)
    PipelineModule(specs(2), topology=PipeModelDataParallelTopology(1, 2, 1), rank=1).save_state_dict(tmp_path)
    with pytest.raises(ValueError, match=r"layer 0 in .* has 2 files, .* 1 slices are loading"):
        part.load_state_dir(tmp_path)
    assert [os.path.basename(path) for path in part.ckpt_layer_path_list(tmp_path, 1)] == [
        "layer_01-model_00-model_states.pt", "layer_01-model_01-model_states.pt"
    ]  # fmt: skip


class Engine:
    """A checkpoint engine as DeepSpeed calls it."""

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}

    def makedirs(self, path: str, exist_ok: bool) -> None:
        assert exist_ok

    def save(self, state_dict: Any, path: str) -> None:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).touch()
        self.files[path] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        return self.files[path]


def test_a_checkpoint_engine_of_deepspeed_s_kind(tmp_path: Path) -> None:
    engine = Engine()
    first, second = parts_of(specs, 1, 1)[0], parts_of(specs, 1, 2)[0]
    first.save_state_dict(tmp_path / "a", engine)
    second.load_state_dir(tmp_path / "a", engine)
    assert len(engine.files) == 4
    assert torch.equal(states([first])["2.linear.weight"], states([second])["2.linear.weight"])


def save_and_load(directory: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    part = PipelineModule(tied_specs(), 2)
    part.save_state_dict(directory)
    torch.distributed.barrier()
    torch.manual_seed(4)
    other = PipelineModule(tied_specs(), 2, partition_method="uniform")
    other.load_state_dir(directory)
    return {name: value.clone() for name, value in other.state_dict().items()}


def test_layer_files_two_ranks(ranks: Launcher, tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = PipelineModule(tied_specs(), 1).state_dict()
    for state in ranks(2)(save_and_load, str(tmp_path)):
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
