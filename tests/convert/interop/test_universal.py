"""Universal checkpoints: what is written is read back in every bit, both of DeepSpeed's layouts are read."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_strategy.checkpoint import CheckpointReader
from zero_strategy.convert import megatron as megatron_rules
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import PortableOptimizer, PortableState, StoredTensor, portable_of, write_portable
from zero_strategy.convert.universal import detect, read, write

SHAPES = {"h.10.w": (4, 3), "h.9.w": (2, 5), "h.9.b": (5,), "s": (), "none": (0, 3)}


def values(kind: str, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, kind + name)))
    return torch.randn(SHAPES[name], generator=generator)


def example(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> PortableState:
    kinds = {kind: {n: StoredTensor.of(n, values(kind, n)) for n in SHAPES} for kind in ("exp_avg", "exp_avg_sq")}
    if dtype != torch.float32:
        kinds["master"] = {n: StoredTensor.of(n, values("w", n)) for n in SHAPES}
    weights = {n: StoredTensor.of(n, values("w", n).to(dtype)) for n in SHAPES}
    weights["frozen"] = StoredTensor.of("frozen", torch.arange(6).view(2, 3).to(dtype))
    weights["count"] = StoredTensor.of("count", torch.tensor([1, 2]))
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1, "params": ["h.10.w", "h.9.w", "none"]},
        {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0, "params": ["h.9.b", "s"]},
    ]
    state = PortableState(
        weights=weights,
        aliases={"tied": "h.9.w"},
        optimizers=[PortableOptimizer(kinds, {n: {"step": 7.0} for n in SHAPES}, {"step": "float32"}, groups)],
        counters={"global_steps": 7, "global_samples": 70, "skipped_steps": 2},
        loss_scaler={"scale": 128.0, "good_steps": 5, "skipped": 2},
        client_state={"epoch": 3, "tensor": torch.ones(2)},
        lr_scheduler={"last_batch_iteration": 6},
    )
    for key, value in changes.items():
        setattr(state, key, value)
    return state


def same(a: dict[str, StoredTensor], b: dict[str, StoredTensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        one, other = a[name].load(), b[name].load()
        assert (one.dtype, one.shape) == (other.dtype, other.shape) == (a[name].spec.dtype, a[name].spec.shape)
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_and_read_back(tmp_path: Path, dtype: torch.dtype) -> None:
    state = example(dtype)
    write(state, tmp_path / "tag")
    assert (tmp_path / "latest_universal").read_text() == "tag"
    assert detect(tmp_path) and detect(tmp_path / "tag") and not detect(tmp_path / "tag" / "zero")
    (tmp_path / "latest").write_text("another")
    assert detect(tmp_path / "tag") and not detect(tmp_path)
    for path in (tmp_path, tmp_path / "tag"):
        found = read(path)
        same(found.weights, state.weights)
        assert found.optimizers[0].kinds.keys() == state.optimizers[0].kinds.keys()
        for kind, tensors in state.optimizers[0].kinds.items():
            same(found.optimizers[0].kinds[kind], tensors)
        assert found.optimizers[0].scalars == state.optimizers[0].scalars
        assert found.optimizers[0].scalar_dtypes == {"step": "float32"}
        assert found.optimizers[0].param_groups == state.optimizers[0].param_groups
        assert (found.aliases, found.counters, found.lr_scheduler) == (
            state.aliases,
            state.counters,
            state.lr_scheduler,
        )
        assert found.client_state["epoch"] == 3 and torch.equal(found.client_state["tensor"], torch.ones(2))
        assert found.loss_scaler == state.loss_scaler


def test_weights_alone(tmp_path: Path) -> None:
    write(example(), tmp_path / "tag")
    found = read(tmp_path, weights_only=True)
    assert not found.optimizers and found.loss_scaler is None
    same(found.weights, example().weights)


def test_through_our_own_format(tmp_path: Path) -> None:
    write(example(), tmp_path / "tag")
    write_portable(read(tmp_path), tmp_path / "ours")
    again = portable_of(CheckpointReader(tmp_path / "ours"))
    same(dict(sorted(again.weights.items())), dict(sorted(example().weights.items())))
    assert again.optimizers[0].param_groups == example().optimizers[0].param_groups
    assert again.lr_scheduler == {"last_batch_iteration": 6} and again.loss_scaler == example().loss_scaler


def test_stage_3_sees_only_what_all_groups_agree_on(tmp_path: Path) -> None:
    write(example(), tmp_path / "tag")

    shared = load_restricted(tmp_path / "tag/zero/optimizer_state.pt")
    inner = shared["optimizer_state_dict"]
    assert inner["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]
    assert inner["state"][0]["step"] == 7 and not torch.is_tensor(inner["state"][0]["step"])
    one = example()
    one.optimizers[0].param_groups = [{"lr": 0.1, "params": list(SHAPES)}]
    write(one, tmp_path / "one")
    shared = load_restricted(tmp_path / "one/zero/optimizer_state.pt")
    assert torch.equal(shared["optimizer_state_dict"]["state"][0]["step"], torch.tensor(7.0))


def test_only_tensors_that_are_asked_for_are_in_memory(tmp_path: Path) -> None:
    state, loads = example(), []
    for name, stored in list(state.weights.items()):

        def load(name: str = name, stored: StoredTensor = stored) -> torch.Tensor:
            loads.append(name)
            return stored.load()

        state.weights[name] = StoredTensor(stored.spec, load)
    write(state, tmp_path / "tag")
    assert sorted(loads) == ["count", "frozen"]  # the others are written from their masters


def test_a_parameter_without_state_gets_zeros_as_deepspeed_has_it(tmp_path: Path) -> None:
    state = example()
    for kind in ("exp_avg", "exp_avg_sq"):
        del state.optimizers[0].kinds[kind]["h.9.w"]
    del state.optimizers[0].scalars["h.9.w"]
    with pytest.warns(UserWarning, match=r"1 parameters of group 0 were never updated \(\['h.9.w'\]"):
        write(state, tmp_path / "tag")
    found = read(tmp_path).optimizers[0]
    assert not found.kinds["exp_avg"]["h.9.w"].load().any() and found.scalars["h.9.w"] == {"step": 7.0}


def refuse(state: PortableState, path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(state, path / "tag")
    assert not (path / "tag").exists() and not list(path.iterdir())


def test_what_the_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    refuse(example(optimizers=[]), tmp_path, "has 0 optimizers; DeepSpeed has exactly one")
    refuse(example(client_state={"module": 1, "epoch": 1}), tmp_path, r"keys \['module'\]")
    state = example()
    state.optimizers[0].scalars["h.9.w"]["step"] = 6.0
    refuse(state, tmp_path, "group 0 were updated a different number of times")
    state = example()
    state.optimizers[0].scalars["s"]["mu_product"] = 0.5
    refuse(state, tmp_path, "'mu_product' of parameter 's' is a number")
    state = example()
    state.optimizers[0].kinds["exp_avg"]["s"] = StoredTensor.of("s", torch.zeros(2))
    refuse(state, tmp_path, r"'exp_avg' of parameter 's' has the shape \(2,\)")
    state = example()
    state.optimizers[0].param_groups[1]["params"] = ["h.9.b", "s", "gone"]
    refuse(state, tmp_path, "'gone' of a param group is no weight")


def test_a_target_is_replaced_or_left_alone(tmp_path: Path) -> None:
    write(example(), tmp_path / "tag")
    (tmp_path / "tag" / "stale").write_text("")
    write(example(counters={"global_steps": 8}), tmp_path / "tag")
    assert read(tmp_path).counters["global_steps"] == 8 and not (tmp_path / "tag" / "stale").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is no universal checkpoint; it will not be overwritten"):
        write(example(), tmp_path / "mine")
    broken = example()
    broken.weights["count"] = StoredTensor(broken.weights["count"].spec, lambda: torch.zeros(9))
    with pytest.raises(ValueError, match="'count' was announced as"):
        write(broken, tmp_path / "tag")
    assert read(tmp_path).counters["global_steps"] == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest_universal", "mine", "tag"]


# ---- DeepSpeed's own layouts, made by hand ----


def put(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def stage3(path: Path) -> None:
    """Two ranks, two groups of which the first has two sub-groups; a frozen parameter in two padded parts."""
    names = [["h.10.w"], ["h.9.w"], ["h.9.b"]]
    for name in ("h.10.w", "h.9.w", "h.9.b"):
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            put(path / "zero" / name / f"{kind}.pt", values("w" if kind == "fp32" else kind, name).flatten())
    inner = {
        "state": {number: {"step": torch.tensor(7.0), "exp_avg": torch.zeros(9)} for number in range(3)},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
    }
    put(path / "zero/optimizer_state.pt", {"optimizer_state_dict": inner, "param_groups": inner["param_groups"]})
    frozen = torch.tensor([1.0, 2.0, 3.0, 0.0])
    for rank in range(2):
        module = OrderedDict((n, torch.empty(0, dtype=torch.bfloat16)) for g in names for n in g)
        module["frozen"] = torch.empty(0)
        module["buffer"] = torch.tensor([5.0])
        module["empty"] = torch.empty(0)
        put(
            path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
            {
                "module": module, "buffer_names": ["buffer", "empty"], "shared_params": {"tied": "h.9.w"},
                "param_shapes": [OrderedDict((n, torch.Size(SHAPES[n])) for n in group) for group in names],
                "frozen_param_shapes": {"frozen": torch.Size([3])},
                "frozen_param_fragments": {"frozen": frozen[2 * rank : 2 * rank + 2]},
                "dp_world_size": 2, "mp_world_size": 1, "global_steps": 7, "skipped_steps": 0, "lr_scheduler": None,
            },
        )  # fmt: skip


def test_the_layout_of_stage_3(tmp_path: Path) -> None:
    stage3(tmp_path)
    found = read(tmp_path)
    assert list(found.weights) == ["h.10.w", "h.9.w", "h.9.b", "frozen", "buffer", "empty"]
    for name in ("h.10.w", "h.9.w", "h.9.b"):
        assert torch.equal(found.weights[name].load(), values("w", name).bfloat16())
        assert torch.equal(found.optimizers[0].kinds["master"][name].load(), values("w", name))
        assert torch.equal(found.optimizers[0].kinds["exp_avg_sq"][name].load(), values("exp_avg_sq", name))
        assert found.optimizers[0].scalars[name] == {"step": 7.0}
    assert found.weights["frozen"].load().tolist() == [1, 2, 3] and found.weights["buffer"].load().tolist() == [5]
    assert found.aliases == {"tied": "h.9.w"}
    assert [(g["lr"], g["params"]) for g in found.optimizers[0].param_groups] == [
        (0.1, ["h.10.w", "h.9.w"]), (0.2, ["h.9.b"]),
    ]  # fmt: skip


def tensor_parallel(path: Path, **info: Any) -> None:
    """Two tensor ranks at stage 1: a column, a row, a replicated and a vocabulary parameter, and a frozen one."""
    whole = {"col": (4, 2), "row": (2, 4), "norm": (3,), "embed": (5, 2), "frozen": (4,)}
    rules = {
        "universal_checkpoint_version": 0.4, "original_vocab_size": 5, "vocabulary_parameter_patterns": ["embed"],
        "parameter_with_row_parallelism_patterns": ["row"], "tp_replicated_parameter_patterns": ["norm"], **info,
    }  # fmt: skip
    shards: dict[str, list[torch.Tensor]] = {}
    for number, (name, shape) in enumerate(whole.items()):
        value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 100 * number
        rule = megatron_rules.MergeRules.from_info(rules).rule(name)
        shards[name] = megatron_rules.split(name, value, rule, 2)
        if name != "frozen":
            put(path / "zero" / name / "fp32.pt", {"param": value})
            put(path / "zero" / name / "exp_avg.pt", {"param": value + 0.5})
            put(path / "zero" / name / "step.pt", 4)
    put(path / "zero/optimizer_state.pt", {"param_groups": [{"lr": 0.1, "params": [0]}], "ds_version": "0.19.8"})
    for rank in range(2):
        put(
            path / f"mp_rank_0{rank}_model_states.pt",
            {
                "module": OrderedDict((name, parts[rank].half()) for name, parts in shards.items()),
                "param_shapes": [OrderedDict((n, parts[rank].shape) for n, parts in shards.items() if n != "frozen")],
                "universal_checkpoint_info": rules, "mp_world_size": 2, "dp_world_size": 1, "global_steps": 4,
                "skipped_steps": 0, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2},
            },
        )  # fmt: skip


def test_tensor_parallel_ranks_are_merged(tmp_path: Path) -> None:
    tensor_parallel(tmp_path)
    found = read(tmp_path)
    assert {name: stored.spec.shape for name, stored in found.weights.items()} == {
        "col": (4, 2), "row": (2, 4), "norm": (3,), "embed": (5, 2), "frozen": (4,),
    }  # fmt: skip
    for number, (name, stored) in enumerate(found.weights.items()):
        expected = torch.arange(stored.spec.numel).view(stored.spec.shape) + 100 * number
        assert torch.equal(stored.load(), expected.half())
        if name != "frozen":
            assert torch.equal(found.optimizers[0].kinds["exp_avg"][name].load(), expected + 0.5)
    assert found.optimizers[0].scalars["row"] == {"step": 4} and found.optimizers[0].scalar_dtypes == {}


def test_weights_that_the_converter_mixed_up_are_noticed(tmp_path: Path) -> None:
    tensor_parallel(tmp_path)
    put(tmp_path / "zero/row/fp32.pt", {"param": torch.zeros(2, 4)})
    found = read(tmp_path)
    assert torch.equal(found.weights["col"].load(), torch.arange(8).view(4, 2).half())
    with pytest.raises(ValueError, match=r"'row' has other values in zero/row/fp32.pt.*round_robin_gradients"):
        found.weights["row"].load()
    assert not read(tmp_path, compare=False).weights["row"].load().any()


def test_damage_is_named(tmp_path: Path) -> None:
    stage3(tmp_path)
    (tmp_path / "zero/h.9.w/fp32.pt").unlink()
    with pytest.raises(ValueError, match=r"'h.9.w' has no fp32.pt"):
        read(tmp_path)
    put(tmp_path / "zero/h.9.w/fp32.pt", torch.zeros(9))
    with pytest.raises(ValueError, match=r"has the shape \(9,\), parameter 'h.9.w' has \(2, 5\)"):
        read(tmp_path)
    stage3(tmp_path)
    (tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ValueError, match=r"\[\(0, 0\)\] are missing|no model file of mp rank 0"):
        read(tmp_path)
    with pytest.raises(ValueError, match="is no universal checkpoint"):
        read(tmp_path / "zero")
    assert not detect(tmp_path / "nothing")


# ---- how tensor-parallel runs divide parameters ----


def with_layouts(path: Path) -> Path:
    info = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [{"patterns": [r"h\.10\.w"], "shape": ((2, 1, 1), -1), "partition_dim": 0}],
        "sub_param_shard_widths": {r"h\.10\.w": [[1, 1], [1, 0], [0, 1]]},
        "parameter_with_2_sub_params_cat_dim_0": [r"h\.9\.w"],
        "parameter_with_row_parallelism_patterns": ["none"],
    }
    write(example(user={"deepspeed": {"universal_checkpoint_info": info}}), path / "tag")
    return path / "tag" / "zero"


def test_layouts_go_along(tmp_path: Path) -> None:
    zero = with_layouts(tmp_path)
    shape = load_restricted(zero / "h.10.w/fp32.pt")["sub_param_shape"]
    assert megatron_rules.SubparamShape.of(shape) == megatron_rules.SubparamShape((r"h\.10\.w",), ((2, 1, 1), -1), 0)
    halves, row = (load_restricted(zero / name / "exp_avg.pt") for name in ("h.9.w", "none"))
    assert (halves["cat_dim"], halves["param_n_sub_params"], row["cat_dim"]) == (0, 2, 1)
    assert read(tmp_path).user["deepspeed"]["universal_checkpoint_info"]["sub_param_shard_widths"]


def test_deepspeed_knows_the_class_of_a_layout(tmp_path: Path) -> None:
    theirs = pytest.importorskip("deepspeed.checkpoint")
    found = torch.load(with_layouts(tmp_path) / "h.10.w/fp32.pt", weights_only=False)["sub_param_shape"]
    assert found == theirs.SubparamShape([r"h\.10\.w"], ((2, 1, 1), -1), 0)
