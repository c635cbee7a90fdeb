"""Pipelines and tensor-parallel ranks are merged: hand-made files against the tensors they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.interop.parallel_files import KINDS, save_rank, shards_of, value
from zero_strategy.checkpoint import CheckpointReader
from zero_strategy.convert.deepspeed import detect, read
from zero_strategy.convert.megatron import MergeRules
from zero_strategy.convert.pipeline_layers import MEGATRON_GPT
from zero_strategy.convert.portable import PortableState, portable_of, write_portable

INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.4,
    "original_vocab_size": 5,
    "vocabulary_parameter_patterns": [r"embed", r"tied_modules\.embed"],
    "parameter_with_row_parallelism_patterns": [r".*row"],
    "tp_replicated_parameter_patterns": [r".*norm"],
}
RULES = MergeRules.from_info(INFO)


def check(state: PortableState, whole: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    (optimizer,) = state.optimizers
    for name, shape in whole.items():
        expected = value("w", name, shape)
        assert state.weights[name].spec.shape == shape
        assert torch.equal(state.weights[name].load(), expected.to(dtype)), name
        if dtype != torch.float32:
            assert torch.equal(optimizer.kinds["master"][name].load(), expected)
        for kind in KINDS:
            assert torch.equal(optimizer.kinds[kind][name].load(), value(kind, name, shape)), (kind, name)
        assert optimizer.scalars[name]["step"] == 5
    assert ("master" in optimizer.kinds) == (dtype != torch.float32)
    assert state.counters == {"global_steps": 5, "global_samples": 40, "skipped_steps": 0}


# ---- tensor parallelism without a pipeline ----

FLAT = {"embed": (5, 3), "col": (4, 3), "row": (3, 4), "norm": (3,), "bias": (6,)}


def tensor_parallel(path: Path, tp: int, dp: int, dtype: torch.dtype, **more: Any) -> Path:
    path.mkdir()
    for rank in range(tp):
        parts = shards_of(FLAT, RULES, rank, tp)
        module = {name: parts[name].to(dtype) for name in FLAT}
        module["position"] = torch.arange(4)
        names = {"embed": "a", "col": "a", "row": "a", "norm": "b", "bias": "b"}
        info = {"universal_checkpoint_info": INFO, "module": module, "buffer_names": ["position"], **more}
        save_rank(path, rank, names, parts, (1, tp, dp), **info)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_tensor_parallel_ranks(tmp_path: Path, dp: int, dtype: torch.dtype) -> None:
    state = read(tensor_parallel(tmp_path / "tag", 2, dp, dtype))
    check(state, FLAT, dtype)
    assert torch.equal(state.weights["position"].load(), torch.arange(4))
    groups = state.optimizers[0].param_groups
    assert [(group["lr"], group["params"]) for group in groups] == [
        (0.1, ["embed", "col", "row"]), (0.2, ["norm", "bias"]),
    ]  # fmt: skip


def test_the_latest_tag_and_our_own_format(tmp_path: Path) -> None:
    tensor_parallel(tmp_path / "tag", 2, 2, torch.bfloat16)
    (tmp_path / "latest").write_text("tag")
    assert detect(tmp_path)
    write_portable(read(tmp_path), tmp_path / "ours")
    check(portable_of(CheckpointReader(tmp_path / "ours")), FLAT, torch.bfloat16)


def test_without_rules_shards_are_not_guessed(tmp_path: Path) -> None:
    tensor_parallel(tmp_path / "tag", 2, 1, torch.float32, universal_checkpoint_info=None)
    with pytest.raises(ValueError, match=r"2 tensor-parallel ranks, but no universal_checkpoint_info.*pass rules="):
        read(tmp_path / "tag")
    check(read(tmp_path / "tag", rules=RULES), FLAT, torch.float32)


# ---- pipelines ----

LAYERS = {
    0: {"weight": (5, 3)},
    1: {"col": (4, 3), "norm": (3,)},
    10: {"row": (3, 4), "col": (4, 3)},
    12: {"norm": (3,)},
}
OWNER = {0: 0, 1: 0, 10: 1, 12: 1}


def pipeline(path: Path, tp: int, dp: int, dtype: torch.dtype, **more: Any) -> dict[str, tuple[int, ...]]:
    """Two stages: a tied embedding that both have, and whose file is the first one's."""
    path.mkdir()
    full = {(layer, local): f"{layer}.{local}" for layer, named in LAYERS.items() for local in named}
    full[0, "weight"] = "tied_modules.embed.weight"
    whole = {full[layer, local]: shape for layer, named in LAYERS.items() for local, shape in named.items()}
    for rank in range(tp):
        parts = shards_of(whole, RULES, rank, tp)
        for layer, named in LAYERS.items():
            suffix = f"-model_{rank:02d}" if tp > 1 else ""
            state = {local: parts[full[layer, local]].to(dtype) for local in named}
            if layer:
                state |= {"steps": torch.tensor(3), "angles": torch.arange(2)}
            torch.save(state, path / f"layer_{layer:02d}{suffix}-model_states.pt")
        for pp in range(2):
            names = {
                full[layer, local]: "a" for layer, named in LAYERS.items() for local in named if OWNER[layer] == pp
            }
            names = {"tied_modules.embed.weight": "a", **names}
            names = {name: "b" if "norm" in name else "a" for name in names}
            info = {"universal_checkpoint_info": INFO, "buffer_names": [f"{layer}.angles" for layer in LAYERS], **more}
            save_rank(path, pp * tp + rank, names, parts, (2, tp, dp), **info)
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_pipelines(tmp_path: Path, tp: int, dp: int, dtype: torch.dtype) -> None:
    whole = pipeline(tmp_path / "tag", tp, dp, dtype)
    state = read(tmp_path / "tag")
    check(state, whole, dtype)
    assert state.aliases == {"0.weight": "tied_modules.embed.weight"}
    assert [name for name in state.weights if name in whole] == list(whole)
    assert state.weights["10.steps"].load() == 3 and state.weights["10.angles"].load().tolist() == [0, 1]
    first, second = state.optimizers[0].param_groups
    assert first["params"] == ["tied_modules.embed.weight", "1.col", "10.row", "10.col"]
    assert second["params"] == ["1.norm", "12.norm"]
    alone = read(tmp_path / "tag", optimizer=False)
    assert not alone.optimizers and torch.equal(alone.weights["10.row"].load(), state.weights["10.row"].load())


def test_a_tied_parameter_that_stages_disagree_on(tmp_path: Path) -> None:
    pipeline(tmp_path / "tag", 1, 1, torch.float32)
    file = tmp_path / "tag/zero_pp_rank_0_mp_rank_01_optim_states.pt"
    content = torch.load(file)
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][0] += 1
    torch.save(content, file)
    state = read(tmp_path / "tag")
    with pytest.raises(ValueError, match=r"'tied_modules.embed.weight' is tied, but stages 0 and 1"):
        state.optimizers[0].kinds["exp_avg"]["tied_modules.embed.weight"].load()
    copied = MergeRules(pipeline_replicated=("tied_modules",))
    kinds = read(tmp_path / "tag", rules=copied).optimizers[0].kinds
    assert kinds["exp_avg"]["tied_modules.embed.weight"].load().shape == (5, 3)


def test_several_files_of_a_tied_layer_s_shape(tmp_path: Path) -> None:
    pipeline(tmp_path / "tag", 1, 1, torch.float16)
    file = tmp_path / "tag/layer_07-model_states.pt"
    torch.save({"weight": torch.zeros(5, 3, dtype=torch.float16)}, file)
    state = read(tmp_path / "tag")
    assert state.aliases == {"0.weight": "tied_modules.embed.weight"}
    assert not state.weights["7.weight"].load().any()
    with pytest.raises(ValueError, match="several layer files may be of tied layer 'embed'"):
        read(tmp_path / "tag", optimizer=False)


def test_merged_layers_what_is_missing_is_named(tmp_path: Path) -> None:
    pipeline(tmp_path / "tag", 2, 1, torch.float32)
    (tmp_path / "tag/layer_10-model_01-model_states.pt").rename(tmp_path / "kept")
    with pytest.raises(ValueError, match=r"tensor-parallel ranks 0 and 1 do not have the same layer files: \[10\]"):
        read(tmp_path / "tag")
    (tmp_path / "kept").rename(tmp_path / "tag/layer_10-model_01-model_states.pt")
    (tmp_path / "tag/layer_00-model_00-model_states.pt").unlink()
    (tmp_path / "tag/layer_00-model_01-model_states.pt").unlink()
    with pytest.raises(ValueError, match=r"no layer file has the parameters of tied layer 'embed': \['weight'\]"):
        read(tmp_path / "tag")
    (tmp_path / "tag/mp_rank_03_model_states.pt").unlink()
    (tmp_path / "tag/zero_pp_rank_0_mp_rank_03_optim_states.pt").unlink()
    with pytest.raises(ValueError, match=r"pp 2 and tp 2; model-parallel rank\(s\) \[3\] are missing"):
        read(tmp_path / "tag")


def test_ranks_of_different_steps(tmp_path: Path) -> None:
    pipeline(tmp_path / "tag", 2, 1, torch.float32)
    file = tmp_path / "tag/zero_pp_rank_0_mp_rank_01_optim_states.pt"
    content = torch.load(file)
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] = 6
    torch.save(content, file)
    with pytest.raises(ValueError, match=r"'1.norm' has the state .*5.* on tensor-parallel rank 0 and .*6.* on rank 1"):
        read(tmp_path / "tag")


def test_megatron_s_gpt_is_known_by_its_names(tmp_path: Path) -> None:
    (tmp_path / "tag").mkdir()
    local = {
        "input_layernorm.weight": (4,), "self_attention.query_key_value.weight": (12, 4),
        "self_attention.dense.weight": (4, 4), "self_attention.dense.bias": (4,), "mlp.dense_h_to_4h.bias": (16,),
        "mlp.dense_4h_to_h.weight": (4, 16),
    }  # fmt: skip
    whole: dict[str, tuple[int, ...]] = {f"3.{name}": shape for name, shape in local.items()} | {"5.weight": (4,)}
    for rank in range(2):
        parts = shards_of(whole, MEGATRON_GPT, rank, 2)
        assert parts["3.self_attention.dense.weight"].shape == (4, 2) and parts["5.weight"].shape == (4,)
        torch.save(
            {name: parts[f"3.{name}"] for name in local}, tmp_path / f"tag/layer_03-model_{rank:02d}-model_states.pt"
        )
        torch.save({"weight": parts["5.weight"]}, tmp_path / f"tag/layer_05-model_{rank:02d}-model_states.pt")
        save_rank(tmp_path / "tag", rank, dict.fromkeys(whole, "a"), parts, (1, 2, 1))
    check(read(tmp_path / "tag"), whole, torch.float32)
