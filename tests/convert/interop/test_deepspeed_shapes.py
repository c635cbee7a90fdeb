"""Worlds, shapes and places that DeepSpeed cannot be brought to produce on a processor."""

from __future__ import annotations

import datetime
import os
import resource
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict

from tests.convert.interop.written import ROOT
from tests.convert.interop.zero_files import Truth, model_states, write_stage2, write_stage3
from zero_strategy.checkpoint import CheckpointReader
from zero_strategy.convert import deepspeed
from zero_strategy.convert.portable import loaded, portable_of, write_portable

SHAPES = [{"a": (3, 5), "b": (), "c": (7,)}, {"d": (1,), "e": (2, 2, 3)}]
FROZEN = {"f": (5, 3), "g": (2,)}


def check(tag: Path, truth: Truth, dtype: torch.dtype = torch.bfloat16) -> None:
    state = deepspeed.read(tag)
    (optimizer,) = state.optimizers
    trained = {name for group in truth.groups for name in group}
    assert list(state.weights) == list(truth.weights)
    for name, value in truth.weights.items():
        assert torch.equal(loaded(state.weights[name]), value.to(dtype)), name
    if dtype != torch.float32:
        assert {name: loaded(t).tolist() for name, t in optimizer.kinds["master"].items()} == {
            name: truth.weights[name].tolist() for name in trained
        }
    for kind, values in truth.moments.items():
        for name, value in values.items():
            assert torch.equal(loaded(optimizer.kinds[kind][name]), value), (kind, name)
    assert optimizer.scalars == {name: {"step": 7.0} for name in trained}
    assert optimizer.scalar_dtypes == {"step": "float32"}
    assert [group["params"] for group in optimizer.param_groups] == [list(group) for group in truth.groups]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1 + n for n in range(len(truth.groups))]
    assert all("step" not in group for group in optimizer.param_groups)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 12, 17, 40])
def test_any_number_of_ranks_with_padding_on_several_of_them(tmp_path, world):
    """Beyond ten ranks, file names must be sorted as numbers; with forty, most ranks hold nothing but padding."""
    for dtype in (torch.bfloat16, torch.float32):
        truth = Truth(SHAPES, FROZEN)
        check(write_stage2(tmp_path / f"two{dtype}", truth, world, dtype), truth, dtype)
        check(write_stage3(tmp_path / f"three{dtype}", truth, world, dtype), truth, dtype)


@pytest.mark.parametrize("shapes", [[{"a": ()}], [{"a": (1,)}, {"b": (1, 1)}], [{"a": (64,)}], [{"a": (65, 1)}]])
def test_a_group_of_one_small_parameter(tmp_path, shapes):
    for world in (1, 4, 13):
        truth = Truth(shapes)
        check(write_stage2(tmp_path / f"two{world}", truth, world), truth)
        check(write_stage3(tmp_path / f"three{world}", truth, world), truth)


def test_parameters_that_are_aligned_inside_of_the_flat_buffer(tmp_path):
    truth = Truth(SHAPES)
    check(write_stage2(tmp_path / "tag", truth, 3, gaps=3), truth)


@pytest.mark.parametrize("prefix", ["", "bf16_", "fp16_"])
def test_all_prefixes_of_file_names(tmp_path, prefix):
    truth = Truth(SHAPES)
    check(write_stage2(tmp_path / "tag", truth, 2, prefix=prefix), truth)


def test_names_without_an_underscore_of_old_versions(tmp_path):
    truth = Truth(SHAPES)
    tag = write_stage2(tmp_path / "tag", truth, 2)
    for path in tag.glob("*optim_states.pt"):
        path.rename(str(path).replace("_optim_states", "optim_states"))
    check(tag, truth)


@pytest.mark.parametrize("world", [1, 3, 11])
def test_state_that_was_kept_on_nvme(tmp_path, world):
    truth = Truth(SHAPES, FROZEN)
    check(write_stage3(tmp_path / "tag", truth, world, nvme=True), truth)


def test_a_missing_or_short_file_from_nvme_is_named(tmp_path):
    tag = write_stage3(tmp_path / "tag", Truth(SHAPES), 2, nvme=True)
    path = tag / "offloaded_tensors" / "rank01" / "exp_avg-0_2.tensor.swp"
    content = path.read_bytes()
    path.write_bytes(content[:40])
    with pytest.raises(ValueError, match=r"rank01/exp_avg-0_2\.tensor\.swp: has 40 bytes, sub-group 0 takes 52"):
        deepspeed.read(tag)
    path.unlink()
    with pytest.raises(ValueError, match=r"rank01/exp_avg-0_2\.tensor\.swp: is missing"):
        deepspeed.read(tag)


def test_names_of_nvme_files_lead_nowhere_else(tmp_path):
    tag = write_stage3(tmp_path / "tag", Truth(SHAPES), 1, nvme=True)
    (path,) = tag.glob("*optim_states.pt")
    content = torch.load(path, weights_only=False)
    content["optimizer_state_dict"]["fp32_flat_groups"][0].ds_id = "../../x"
    torch.save(content, path)
    with pytest.raises(ValueError, match="does not say where on NVMe"):
        deepspeed.read(tag)


def test_ranks_at_different_steps_are_of_different_saves(tmp_path):
    for name, tag in (
        ("step", write_stage2(tmp_path / "two", Truth(SHAPES), 2)),
        ("step", write_stage3(tmp_path / "three", Truth(SHAPES), 2)),
    ):
        (path,) = tag.glob("*zero_pp_rank_1_*optim_states.pt")
        content = torch.load(path, weights_only=False)
        state = content["optimizer_state_dict"]
        inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
        inner["state"][0][name] = 8
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"different values of 'step': \[7(\.0)?, 8\]"):
            deepspeed.read(tag)
    tag = write_stage3(tmp_path / "model", Truth(SHAPES), 2)
    path = tag / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    torch.save(torch.load(path, weights_only=False) | {"global_steps": 8}, path)
    with pytest.raises(ValueError, match=r"zero_pp_rank_1.*: global_steps is 8, in zero_pp_rank_0.* 7"):
        deepspeed.read(tag)


def test_state_that_is_neither_per_element_nor_a_number_is_named(tmp_path):
    tag = write_stage2(tmp_path / "tag", Truth(SHAPES), 2)
    for path in tag.glob("*optim_states.pt"):
        content = torch.load(path, weights_only=False)
        content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["rows"] = torch.ones(3, 3)
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"optimizer state 'rows' is a tensor of shape \(3, 3\).*optimizer=False"):
        deepspeed.read(tag)
    assert deepspeed.read(tag, optimizer=False).weights


def test_hyper_parameters_in_the_client_state_of_lightning(tmp_path):
    tag = write_stage2(tmp_path / "tag", Truth(SHAPES), 1)
    hparams = AttributeDict(lr=0.1, layers=[1, 2])
    more = {"epoch": 4, "hyper_parameters": hparams, "args": Namespace(depth=2)}
    torch.save(model_states(Truth(SHAPES), 1, torch.bfloat16, **more), tag / "mp_rank_00_model_states.pt")
    state = deepspeed.read(tag)
    expected = {"epoch": 4, "hyper_parameters": {"lr": 0.1, "layers": [1, 2]}, "args": {"depth": 2}}
    assert state.client_state == expected
    write_portable(state, tmp_path / "ours")
    assert portable_of(CheckpointReader(tmp_path / "ours")).client_state == expected


def test_a_class_that_is_not_on_the_list_is_named_and_can_be_read_as_data(tmp_path):
    tag = write_stage2(tmp_path / "tag", Truth(SHAPES), 1)
    path = tag / "mp_rank_00_model_states.pt"
    torch.save(model_states(Truth(SHAPES), 1, torch.bfloat16, when=datetime.date(2020, 1, 2)), path)
    with pytest.raises(ValueError, match=r"mp_rank_00_model_states\.pt: holds datetime\.date"):
        deepspeed.read(tag)
    assert deepspeed.read(tag, allow={"datetime.date": None}).client_state == {"when": [b"\x07\xe4\x01\x02"]}


def test_a_tied_parameter_whose_names_share_no_memory_and_empty_ones_that_seem_tied(tmp_path):
    """DeepSpeed calls all empty parameters one, for they begin at the same address."""
    truth = Truth([{"a": (3, 5)}])
    tag = write_stage2(tmp_path / "tag", truth, 2)
    content = model_states(truth, 2, torch.bfloat16, shared_params={"again": "a", "empty2": "empty1"})
    content["module"] |= {"again": truth.weights["a"].to(torch.bfloat16)}
    content["module"] |= {"empty1": torch.empty(0, 2), "empty2": torch.empty(4, 0)}
    torch.save(content, tag / "mp_rank_00_model_states.pt")
    state = deepspeed.read(tag)
    assert state.aliases == {"again": "a"} and list(state.weights) == ["a", "empty1", "empty2"]
    assert state.weights["empty2"].spec.shape == (4, 0)


def test_stage_0_names_are_asked_for_where_order_and_shapes_leave_more_than_one_way(tmp_path):
    weights = {"a": torch.zeros(2), "b": torch.zeros(2)}
    state = {i: {"step": torch.tensor(1.0), "exp_avg": torch.full((2,), float(i))} for i in range(2)}
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    content = model_states(Truth([]), 1, torch.float32, param_shapes=None, module=weights)
    content["optimizer"] = {"state": state, "param_groups": groups}
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(ValueError, match=r"more than one way .* 2 parameters to its 2 param group.*pass groups="):
        deepspeed.read(tmp_path)
    optimizer = deepspeed.read(tmp_path, groups=[["b"], ["a"]]).optimizers[0]
    assert loaded(optimizer.kinds["exp_avg"]["a"]).tolist() == [1.0, 1.0]
    assert [group["params"] for group in optimizer.param_groups] == [["b"], ["a"]]
    with pytest.raises(ValueError, match=r"has no parameter 'c', which groups\[1\] names"):
        deepspeed.read(tmp_path, groups=[["b"], ["c"]])
    with pytest.raises(ValueError, match=r"parameter 'a' does not fit its place in param group 0"):
        deepspeed.read(tmp_path, groups=[["b", "a"], []])


def test_a_fused_fp16_wrapper_has_one_flat_tensor_per_group(tmp_path):
    truth = Truth(SHAPES)
    flats = [torch.cat([truth.weights[name].reshape(-1) for name in group]) for group in SHAPES]
    state = {}
    for number, group in enumerate(SHAPES):
        moments = {k: torch.cat([v[name].reshape(-1) for name in group]) for k, v in truth.moments.items()}
        state[number] = {"step": 7, **moments}
    groups = [{"lr": 0.1 + number, "params": [number]} for number in range(2)]
    content = model_states(truth, 1, torch.float16, param_shapes=None)
    content["optimizer"] = {
        "dynamic_loss_scale": True, "cur_scale": 1024.0, "cur_iter": 12, "last_overflow_iter": 4, "scale_factor": 2.0,
        "scale_window": 5, "clip_grad": 1.0, "fp32_groups_flat": flats,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
    }  # fmt: skip
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    check(tmp_path, truth, torch.float16)
    assert deepspeed.read(tmp_path).loss_scaler == {"scale": 1024.0, "good_steps": 1, "skipped": 0}


PEAK = """
import resource, sys
from pathlib import Path
from zero_strategy.convert import deepspeed
from zero_strategy.convert.portable import loaded
def anonymous():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) * 1024
state = deepspeed.read(Path(sys.argv[1]))
before, most = anonymous(), 0
for _, tensor in state.tensors():
    value = loaded(tensor)
    most = max(most, anonymous() - before)
    del value
print(most)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
@pytest.mark.parametrize("stage", [2, 3])
def test_memory_stays_near_one_tensor(tmp_path, stage):
    truth = Truth([{f"w{number}": (1024, 512) for number in range(8)}])  # 2 MiB each, 48 MiB with moments
    write = write_stage2 if stage == 2 else write_stage3
    tag = write(tmp_path / "tag", truth, 3)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PEAK, str(tag)]
    output = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=120).stdout
    assert int(output) < 3 * 1024 * 512 * 4 + 4 * resource.getpagesize() * 256
