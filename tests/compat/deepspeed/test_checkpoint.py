"""`DeepSpeedCheckpoint`: every file has its place on any smaller grid, what is missing is named, DeepSpeed agrees."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.interop.parallel_files import save_rank, shards_of, value
from zero_strategy.compat import deepspeed as integration
from zero_strategy.compat.deepspeed import DeepSpeedCheckpoint, ZeROCheckpoint, merge_state
from zero_strategy.convert.pipeline_layers import MEGATRON_GPT

PP, TP, DP = 2, 4, 2
EMBEDDING = {"word_embeddings.weight": (8, 4), "position_embeddings.weight": (6, 4)}
BLOCK = {
    "input_layernorm.weight": (5,), "self_attention.query_key_value.weight": (12, 4),
    "self_attention.dense.weight": (4, 4), "self_attention.dense.bias": (4,), "mlp.dense_4h_to_h.weight": (4, 16),
}  # fmt: skip
LAYERS = {1: EMBEDDING, 3: BLOCK, 4: BLOCK, 5: BLOCK, 6: BLOCK, 8: {"weight": (4,)}}
STAGE = {1: 0, 3: 0, 4: 0, 5: 1, 6: 1, 8: 1}


def megatron(path: Path) -> Path:
    """A Megatron-DeepSpeed GPT on a grid of 2 x 4 x 2."""
    path.mkdir()
    whole: dict[str, tuple[int, ...]] = {f"{layer}.{n}": s for layer, named in LAYERS.items() for n, s in named.items()}
    for tp in range(TP):
        parts = shards_of(whole, MEGATRON_GPT, tp, TP)
        for layer, named in LAYERS.items():
            state = {local: parts[f"{layer}.{local}"] for local in named}
            torch.save(state, path / f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")
        for pp in range(PP):
            names = {name: "b" if "norm" in name else "a" for name in whole if STAGE[int(name.split(".")[0])] == pp}
            more = {"iteration": 12, "args": argparse.Namespace(hidden=4), "checkpoint_info": {"x": 1}}
            save_rank(path, pp * TP + tp, names, parts, (PP, TP, DP), **more)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return megatron(tmp_path_factory.mktemp("megatron") / "tag")


def names(files: Any) -> Any:
    return [names(file) for file in files] if isinstance(files, list) else Path(files).name


def test_degrees_layers_and_metadata(saved: Path) -> None:
    found = DeepSpeedCheckpoint(saved)
    assert (found.pp_degree, found.tp_degree, found.dp_degree, found.world_size) == (PP, TP, DP, 16)
    assert found.layer_keys == ["layer_01", "layer_03", "layer_04", "layer_05", "layer_06", "layer_08"]
    assert (found.get_embedding_layer_id(), found.get_final_norm_layer_id()) == ("layer_01", "layer_08")
    assert [found.get_pp_transformer_map(pp) for pp in range(2)] == [["layer_03", "layer_04"], ["layer_05", "layer_06"]]
    assert found.get_iteration() == 12 and found.get_args() == argparse.Namespace(hidden=4)
    assert found.get_checkpoint_info() == {"x": 1} and found.get_checkpoint_info("nothing") is None
    assert not found.is_change_tp_degree() and not found.is_change_pp_degree() and not found.is_change_dp_degree()
    found.validate_files()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_smaller_grid_gets_joined_shards(saved: Path, pp: int, tp: int) -> None:
    found = DeepSpeedCheckpoint(saved, tp_degree=tp, pp_degree=pp)
    blocks: list[dict[str, torch.Tensor]] = []
    for stage in range(pp):
        parts = [found.get_transformer_state(rank, stage) for rank in range(tp)]
        for layer in range(len(parts[0])):
            rows = [part[layer] for part in parts]
            dims = {
                "self_attention.dense.weight": 1,
                "mlp.dense_4h_to_h.weight": 1,
                "self_attention.query_key_value.weight": 0,
            }
            blocks.append({n: torch.cat([r[n] for r in rows], dims[n]) if n in dims else rows[0][n] for n in rows[0]})
    for number, layer in enumerate([3, 4, 5, 6]):
        for local, shape in BLOCK.items():
            assert torch.equal(blocks[number][local], value("w", f"{layer}.{local}", shape))
    embedding = torch.cat([found.get_embedding_state(rank)["word_embeddings.weight"] for rank in range(tp)])
    assert torch.equal(embedding, value("w", "1.word_embeddings.weight", (8, 4)))
    assert torch.equal(found.get_final_norm_state(0)["weight"], value("w", "8.weight", (4,)))


def test_optimizer_files_of_a_smaller_grid(saved: Path) -> None:
    found = DeepSpeedCheckpoint(saved, tp_degree=2, pp_degree=2, dp_degree=1)
    assert names(found.get_zero_files(1, 0, 0)) == [
        f"zero_pp_rank_{dp}_mp_rank_0{mp}_optim_states.pt" for mp in (4, 5) for dp in (0, 1)
    ]
    whole = DeepSpeedCheckpoint(saved, dp_degree=1).get_zero_checkpoint_state(0, 0, 0)["optimizer_state_dict"]
    parts = [DeepSpeedCheckpoint(saved).get_zero_checkpoint_state(0, 0, dp)["optimizer_state_dict"] for dp in range(DP)]
    for group in range(2):
        kind = [part["base_optimizer_state"]["state"][group]["exp_avg"] for part in parts]
        assert torch.equal(whole["base_optimizer_state"]["state"][group]["exp_avg"], torch.cat(kind))
        assert not (torch.cat(kind) == 99).any()
    assert whole["partition_count"] == [1, 1] and whole["group_paddings"] == [0, 0]
    padded = DeepSpeedCheckpoint(saved).get_zero_checkpoint_state(0, 0, 1, strip_tensor_paddings=False)
    assert sum(padded["optimizer_state_dict"]["group_paddings"]) > 0


def test_printing(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = DeepSpeedCheckpoint(saved, tp_degree=2)
    found.show_2d_mapping()
    found.show_tp_embedding_map()
    found.show_tp_final_norm_map()
    found.show_pp_transformer_map()
    found.show_transformer_file_map()
    found.zero_checkpoint.print_3d_index_map("index")
    found.zero_checkpoint.print_3d_file_map("file")
    printed = capsys.readouterr().out
    assert "mp_rank_07_model_states.pt" in printed and "layer_08-model_03-model_states.pt" in printed


def test_deepspeed_checkpoint_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory"):
        DeepSpeedCheckpoint(tmp_path / "none")
    with pytest.raises(ValueError, match=r"neither mp_rank_.*name the directory of one tag"):
        DeepSpeedCheckpoint(tmp_path)
    tag = megatron(tmp_path / "tag")
    with pytest.raises(ValueError, match="tp would grow from 4 to 8"):
        DeepSpeedCheckpoint(tag, tp_degree=8)
    with pytest.raises(ValueError, match="tp index 4 is not within"):
        DeepSpeedCheckpoint(tag).get_embedding_state(4)
    (tag / "zero_pp_rank_1_mp_rank_05_optim_states.pt").unlink()
    with pytest.raises(ValueError, match=r"optimizer files of \(data rank, mp rank\) \[\(1, 5\)\] are missing"):
        DeepSpeedCheckpoint(tag)
    (tag / "layer_04-model_02-model_states.pt").unlink()
    with pytest.raises(ValueError, match=r"layer 4 lacks the files of tensor ranks \[2\]|\(1, 5\)"):
        DeepSpeedCheckpoint(tag)
    (tag / "mp_rank_06_model_states.pt").unlink()
    with pytest.raises(ValueError, match=r"model files of mp ranks \[6\] are missing \(pp 2, tp 4\)"):
        DeepSpeedCheckpoint(tag)
    for file in tag.glob("zero_pp*"):
        file.unlink()
    (tag / "mp_rank_06_model_states.pt").write_bytes((tag / "mp_rank_05_model_states.pt").read_bytes())
    (tag / "layer_04-model_02-model_states.pt").write_bytes((tag / "layer_04-model_01-model_states.pt").read_bytes())
    with pytest.raises(ValueError, match="has no ZeRO optimizer files"):
        ZeROCheckpoint(tag)


def test_merging_nested_state() -> None:
    a, b = {"x": [torch.ones(1), 2], "only": 1}, {"x": [torch.zeros(2), 3], "other": 4}
    merged = merge_state(a, b)
    assert merged["x"][0].tolist() == [1, 0, 0] and merged["x"][1] == 2 and merged["only"] == 1 and merged["other"] == 4
    with pytest.raises(ValueError, match=r"x\.0 is a int and a str"):
        merge_state({"x": [1]}, {"x": ["1"]})
    with pytest.raises(ValueError, match="x has 1 and 2 entries"):
        merge_state({"x": [1]}, {"x": [1, 2]})


def test_names_of_the_face() -> None:
    ours = {"DeepSpeedEngine": "ScriptEngine", "DeepSpeedTransformerConfig": "TransformerConfig"}
    ours |= {"DeepSpeedTransformerLayer": "TransformerLayer", "PipelineEngine": "ScriptPipelineEngine"}
    for name in integration.__all__:
        assert getattr(integration, name).__name__ == ours.get(name, name) and name in dir(integration)
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        integration.Engine  # noqa: B018


@pytest.mark.parametrize("target", [{}, {"tp_degree": 2}, {"tp_degree": 1, "pp_degree": 1}, {"dp_degree": 1}], ids=str)
def test_deepspeed_sees_the_same(saved: Path, target: dict[str, int]) -> None:
    theirs = pytest.importorskip("deepspeed.checkpoint")
    expected, found = theirs.DeepSpeedCheckpoint(str(saved), **target), DeepSpeedCheckpoint(saved, **target)
    for attribute in ("tp_degree", "pp_degree", "dp_degree", "world_size", "original_world_size", "layer_count"):
        assert getattr(found, attribute) == getattr(expected, attribute)
    assert found.layer_keys == expected.layer_keys
    assert found.pp_to_transformer_map == expected.pp_to_transformer_map
    assert found.transformer_file_map == expected.transformer_file_map
    assert found.tp_to_embedding_map == expected.tp_to_embedding_map
    assert found.tp_to_final_norm_map == expected.tp_to_final_norm_map
    assert found.new_2d_map.map == expected.new_2d_map.map and found.old_2d_map.map == expected.old_2d_map.map
    assert found.get_args() == expected.get_args() and found.get_iteration() == expected.get_iteration()
    for pp in range(found.pp_degree):
        for tp in range(found.tp_degree):
            assert found.get_2d_parallel_files(tp, pp) == expected.get_2d_parallel_files(tp, pp)
            equal(found.get_transformer_state(tp, pp), expected.get_transformer_state(tp, pp))
            for dp in range(found.dp_degree):
                assert found.get_zero_files(pp, tp, dp) == expected.get_zero_files(pp, tp, dp)
                equal(found.get_zero_checkpoint_state(pp, tp, dp), expected.get_zero_checkpoint_state(pp, tp, dp))
    for tp in range(found.tp_degree):
        equal(found.get_embedding_state(tp), expected.get_embedding_state(tp))
        equal(found.get_final_norm_state(tp), expected.get_final_norm_state(tp))


def equal(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            equal(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b
