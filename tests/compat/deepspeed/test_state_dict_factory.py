"""Megatron state dicts for another number of ranks: dividing and joining are inverse, and DeepSpeed does the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zero_strategy.compat.deepspeed.runtime.state_dict_factory import MegatronSDLoader, SDLoaderFactory

H, HEADS = 8, 4


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "word_embeddings.weight": (16, H), "position_embeddings.weight": (6, H),
        "layers.0.input_layernorm.weight": (H,), "layers.0.attention.query_key_value.weight": (3 * H, H),
        "layers.0.attention.query_key_value.bias": (3 * H,), "layers.0.attention.dense.weight": (H, H),
        "layers.0.attention.dense.bias": (H,), "layers.0.mlp.dense_h_to_4h.weight": (4 * H, H),
        "layers.0.mlp.dense_h_to_4h.bias": (4 * H,), "layers.0.mlp.dense_4h_to_h.weight": (H, 4 * H),
        "layers.0.mlp.dense_4h_to_h.bias": (H,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save(path: Path, count: int, key: str | None = "module", **extra: Any) -> list[str]:
    """One file per rank, as `MegatronSDLoader` divides a whole one."""
    files = []
    torch.save({"module": model(), "mp_world_size": 1, **extra}, path / "whole.pt")
    whole = MegatronSDLoader([path / "whole.pt"], None)
    for rank in range(count):
        state = whole.load(count, rank)[1]
        state = {**state, "mp_world_size": count} if key else state["module"]
        torch.save(state, path / f"{rank}.pt")
        files.append(str(path / f"{rank}.pt"))
    return files


def equal(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("version", [{}, {"checkpoint_version": 1.0}, {"checkpoint_version": 2.0}])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_divided_and_joined_again(tmp_path: Path, count: int, version: dict[str, float]) -> None:
    loader = SDLoaderFactory.get_sd_loader(save(tmp_path, count, **version))
    _, state, (scales, merged) = loader.load(1, 0)
    assert equal(state["module"], model()) and scales is None and merged == count


def test_the_parts_are_those_of_the_table(tmp_path: Path) -> None:
    first = torch.load(save(tmp_path, 2)[0])["module"]
    whole = model()
    assert torch.equal(first["word_embeddings.weight"], whole["word_embeddings.weight"][:8])
    assert torch.equal(first["position_embeddings.weight"], whole["position_embeddings.weight"])
    assert torch.equal(first["layers.0.attention.dense.weight"], whole["layers.0.attention.dense.weight"][:, : H // 2])
    qkv = whole["layers.0.attention.query_key_value.weight"].view(3, 2, H // 2, H)
    assert torch.equal(first["layers.0.attention.query_key_value.weight"], qkv[:, 0].reshape(-1, H))


@pytest.mark.parametrize(("count", "world"), [(4, 2), (2, 4), (2, 2), (1, 2), (4, 1)])
def test_any_number_of_ranks_from_any_other(tmp_path: Path, count: int, world: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    loader = MegatronSDLoader(save(tmp_path / "a", count), None)
    expected = [torch.load(file)["module"] for file in save(tmp_path / "b", world)]
    for rank in range(world):
        path, state, (_, merged) = loader.load(world, rank)
        assert equal(state["module"], expected[rank])
        assert merged == max(1, count // world) and path == loader.ckpt_list[rank * count // world]


def test_layer_files_have_the_model_at_the_top(tmp_path: Path) -> None:
    loader = MegatronSDLoader(save(tmp_path, 2, key=None), 0)
    assert equal(loader.load(1, 0, module_key=None)[1], model())


def test_query_key_value_by_version() -> None:
    loader = object.__new__(MegatronSDLoader)
    whole = torch.arange(24).view(12, 2)
    for version in (0, 1.0, 2.0):
        parts = [loader.split_query_key_value(whole, 2, rank, version) for rank in range(2)]
        assert torch.equal(loader.merge_query_key_value(parts, version), whole)
    assert loader.split_query_key_value(whole, 2, 0, 0)[:, 0].tolist() == [0, 2, 8, 10, 16, 18]
    assert loader.split_query_key_value(whole, 2, 0, 2.0)[:, 0].tolist() == [0, 2, 4, 6, 8, 10]
    with pytest.raises(ValueError, match=r"version 3\.0 is not known"):
        loader.merge_query_key_value([whole], 3.0)
    with pytest.raises(ValueError, match="do not divide evenly among 5"):
        loader.split_query_key_value(whole, 5, 0, 0)


def test_a_pipeline_takes_the_first_of_files_that_are_alike(tmp_path: Path) -> None:
    files = save(tmp_path, 2)
    loader = MegatronSDLoader(files, None)
    path, state, _ = loader.load(4, 3, is_pipe_parallel=True)
    assert path == files[0] and equal(state["module"], torch.load(files[0])["module"])


def test_descriptions(tmp_path: Path) -> None:
    files = save(tmp_path, 2)
    loader = SDLoaderFactory.get_sd_loader_json({"type": "Megatron", "checkpoints": files, "version": 2.0})
    assert loader.version == 2.0 and loader.ckpt_list == files
    (tmp_path / "d.json").write_text('{"type": "BLOOM", "checkpoints": [], "version": 1}')
    assert SDLoaderFactory.get_sd_loader_json(str(tmp_path / "d.json"))["type"] == "BLOOM"
    with pytest.raises(ValueError, match="lacks \\['version'\\]"):
        SDLoaderFactory.get_sd_loader_json({"type": "Megatron", "checkpoints": files})
    with pytest.raises(ValueError, match="'GPT' is not supported"):
        SDLoaderFactory.get_sd_loader(files, sd_type="GPT")


def test_state_dict_factory_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    files = save(tmp_path, 4)
    with pytest.raises(ValueError, match="3 checkpoint files are given, but mp_world_size 4"):
        MegatronSDLoader(files[:3], None)
    with pytest.raises(ValueError, match="no checkpoint files"):
        MegatronSDLoader([], None)
    loader = MegatronSDLoader(files, None)
    with pytest.raises(ValueError, match="4 checkpoint files cannot be merged for 3 ranks"):
        loader.load(3, 0)
    with pytest.raises(ValueError, match="cannot be divided among 6 ranks"):
        loader.load(6, 0)
    with pytest.raises(ValueError, match="mp_rank 2 is not within mp_world_size 2"):
        loader.load(2, 2)
    with pytest.raises(NotImplementedError, match="quantizing"):
        loader.load(4, 0, quantize=True)
    torch.save({"module": {"a": torch.zeros(1)}, "model": {}}, tmp_path / "both.pt")
    with pytest.raises(ValueError, match="one of the keys"):
        MegatronSDLoader([tmp_path / "both.pt"], None).load(2, 0)
    torch.save({"module": {"mlp.dense_4h_to_h.weight": torch.zeros(1)}, "mp_world_size": 2}, tmp_path / "other.pt")
    other = MegatronSDLoader([tmp_path / "other.pt"] * 2, None)
    with pytest.raises(ValueError, match=r"not a Megatron transformer.*attention\.dense\.weight"):
        other.load(1, 0)


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
@pytest.mark.parametrize(("count", "world"), [(4, 2), (2, 4), (2, 2)])
def test_deepspeed_loads_the_same(tmp_path: Path, count: int, world: int, version: float) -> None:
    theirs = pytest.importorskip("deepspeed.runtime.state_dict_factory")
    files = save(tmp_path, count)
    for rank in range(world):
        expected = theirs.SDLoaderFactory.get_sd_loader(files, None, "Megatron", version).load(world, rank)
        made = SDLoaderFactory.get_sd_loader(files, None, "Megatron", version).load(world, rank)
        assert made[0] == expected[0] and made[2] == expected[2]
        assert equal(made[1]["module"], expected[1]["module"])
