"""Checkpoints that the real DeepSpeed wrote give the live engine's weights and moments, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.convert.interop.live import compare, same
from tests.convert.interop.written import LEFT_OUT, ROOT, cases, script, unpack
from zero_strategy.checkpoint import CheckpointReader
from zero_strategy.convert import deepspeed
from zero_strategy.convert.convert import detect
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import PortableState, loaded, portable_of, write_portable


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return unpack(tmp_path_factory.mktemp("deepspeed"))


def live(folder: Path) -> dict[str, Any]:
    return load_restricted(folder / "live.pt")


@pytest.mark.parametrize("case", cases())
def test_what_is_read_is_what_was_live(written, case):
    state = deepspeed.read(written / case / "checkpoint")
    compare(state, live(written / case), missing=LEFT_OUT.get(case, frozenset()))


def test_every_case_that_a_processor_can_run_is_kept(written):
    assert set(script().CASES) - set(cases()) == {"z3_nvme"}  # needs libaio


def test_tied_frozen_empty_and_unused_parameters_and_buffers_are_all_there(written):
    for case in ("z0_fp32", "z1_round_robin", "z2_groups", "z3_groups", "bf16_optimizer_groups"):
        state = deepspeed.read(written / case / "checkpoint")
        assert state.aliases == {"head.weight": "embedding.weight"}
        assert {"base.weight", "base.bias", "unused", "table", "count"} <= state.weights.keys()
        assert ("nothing" in state.weights) == (not case.startswith("z3"))  # stage 3 cannot train with it
        assert state.weights["count"].spec.dtype == torch.int64 and "scratch" not in state.weights
        (optimizer,) = state.optimizers
        assert "unused" in optimizer.kinds["exp_avg"] and "base.weight" not in optimizer.kinds["exp_avg"]


def test_groups_keep_hyper_parameters_of_their_own(written):
    for case in ("z0_fp16_groups", "bf16_optimizer_groups", "z1_groups", "z2_groups", "z3_groups", "z3_sub_groups"):
        first, second = deepspeed.read(written / case / "checkpoint").optimizers[0].param_groups
        assert (first["weight_decay"], first["betas"]) == (0.05, (0.9, 0.999))
        assert (second["weight_decay"], second["betas"]) == (0.0, (0.8, 0.95))
        assert {"unused", "norm.weight"} <= set(second["params"]) and "first.weight" in first["params"]


def test_written_as_ours_it_comes_back_the_same(written, tmp_path):
    for case in ("z0_fp16_groups", "z1_lion", "z2_elastic", "z3_fp16"):
        write_portable(deepspeed.read(written / case / "checkpoint"), tmp_path / case)
        compare(portable_of(CheckpointReader(tmp_path / case)), live(written / case), ordered=False)


def test_the_tag_is_latest_or_the_one_that_is_named_or_the_given_directory(written, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(written / "z1_fp32" / "checkpoint", root)
    shutil.copytree(root / "global_step3", root / "global_step12")
    for path in (root, root / "global_step12"):
        assert detect(path).name == "deepspeed"
    for path, tag, expected in (
        (root, None, "global_step3"),
        (root, "global_step12", "global_step12"),
        (root / "global_step12", None, "global_step12"),
    ):
        assert deepspeed.read(path, tag).user["deepspeed"]["tag"] == expected
    with pytest.raises(ValueError, match=r"'best' is not in .*; there are 'global_step3', 'global_step12'"):
        deepspeed.read(root, "best")
    (root / "latest").write_text("global_step99")
    with pytest.raises(ValueError, match=r"latest: tag 'global_step99' is not in .*'global_step3', 'global_step12'"):
        deepspeed.read(root)
    (root / "latest").unlink()
    with pytest.raises(ValueError, match=r"has no file latest; name one of the tags 'global_step3', 'global_step12'"):
        deepspeed.read(root)
    shutil.rmtree(root / "global_step3")
    assert deepspeed.read(root).user["deepspeed"]["tag"] == "global_step12"
    assert detect(root).name == "deepspeed" and not deepspeed.detect(tmp_path)


def test_weights_can_be_read_without_the_optimizer(written):
    for case in ("z0_bf16", "z1_fp32", "bf16_optimizer", "z2_fp16", "z3_bf16", "z3_init"):
        state = deepspeed.read(written / case / "checkpoint", optimizer=False)
        assert state.optimizers == [] and state.loss_scaler is None and state.counters["global_steps"] == 3
        for name, expected in live(written / case)["weights"].items():
            assert torch.equal(loaded(state.weights[state.aliases.get(name, name)]), expected), name


# ---- damage ----


def damaged(written: Path, case: str, tmp_path: Path) -> Path:
    shutil.copytree(written / case / "checkpoint" / "global_step3", tmp_path / "tag")
    return tmp_path / "tag"


@pytest.mark.parametrize("case", ["z1_bf16", "z2_groups", "z3_groups", "bf16_optimizer"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_named(written, tmp_path, case, rank):
    tag = damaged(written, case, tmp_path)
    (path,) = tag.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    path.unlink()
    with pytest.raises(ValueError, match=rf"files of optimizer states of data-parallel rank\(s\) {rank} are missing"):
        deepspeed.read(tag)


def test_a_missing_file_of_model_states_is_named(written, tmp_path):
    tag = damaged(written, "z3_groups", tmp_path)
    (tag / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ValueError, match=r"files of model states of data-parallel rank\(s\) 1 are missing"):
        deepspeed.read(tag)
    tag = damaged(written, "z1_fp32", tmp_path / "other")
    (tag / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(ValueError, match=r"the model states of model-parallel rank 0 are missing"):
        deepspeed.read(tag)


def test_all_optimizer_files_missing_is_an_error_and_not_a_checkpoint_without_optimizer(written, tmp_path):
    tag = damaged(written, "z2_fp32", tmp_path)
    for path in tag.glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(ValueError, match=r"the files of optimizer states \(\*_optim_states\.pt\) are missing"):
        deepspeed.read(tag)
    assert deepspeed.read(tag, optimizer=False).weights


def test_files_left_over_from_a_larger_world_are_named(written, tmp_path):
    tag = damaged(written, "z2_fp32", tmp_path)
    shutil.copy(tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt", tag / "zero_pp_rank_10_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match=r"2 ranks saved, but there are .* of rank\(s\) 10, left over"):
        deepspeed.read(tag)
    spare = tag / "zero_pp_rank_10_mp_rank_00_optim_states.pt"
    os.rename(spare, tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match=r"bf16_zero_pp_rank_0.* and zero_pp_rank_0.* are of the same rank"):
        deepspeed.read(tag)


@pytest.mark.parametrize(
    "mine, other, pattern, message",
    [
        ("z1_fp32", "z1_groups", "zero_pp_rank_1*optim*", "param group"),
        ("z1_groups", "z1_fp32", "zero_pp_rank_1*optim*", "param group"),
        ("z3_fp32", "z3_sub_groups", "zero_pp_rank_1*optim*", "sub-group"),
        ("z3_fp32", "z1_fp32", "zero_pp_rank_1*optim*", "another save"),
        ("z1_fp32", "z1_sgd", "zero_pp_rank_1*optim*", "different keys"),
        ("z1_fp32", "z2_no_frozen", "zero_pp_rank_1*optim*", "another save|elements"),
        ("z1_fp32", "z1_groups", "mp_rank_00_model_states.pt", "param group"),
        ("z3_groups", "z3_fp32", "zero_pp_rank_0*model*", "sub-group"),
    ],
)
def test_files_of_another_save_are_noticed(written, tmp_path, mine, other, pattern, message):
    tag = damaged(written, mine, tmp_path)
    (source,) = (written / other / "checkpoint" / "global_step3").glob(pattern)
    shutil.copy(source, tag / source.name)
    with pytest.raises(ValueError, match=message):
        for tensor in [t for _, t in deepspeed.read(tag).tensors()]:
            loaded(tensor)


@pytest.mark.parametrize("case", ["z1_fp32", "z3_groups", "z0_fp16"])
def test_every_truncated_file_is_named(written, tmp_path, case):
    tag = damaged(written, case, tmp_path)
    for path in sorted(tag.iterdir()):
        whole = path.read_bytes()
        for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(ValueError, match=path.name):
                deepspeed.read(tag)
        path.write_bytes(whole)
    deepspeed.read(tag)


@pytest.mark.parametrize("case", ["z1_fp32", "z3_groups", "z0_fp16", "bf16_optimizer"])
def test_flipped_bits_of_any_file_are_noticed(written, tmp_path, case):
    tag = damaged(written, case, tmp_path)
    whole = [tensor for _, tensor in deepspeed.read(tag).tensors()]
    random, expected = np.random.default_rng(0), [loaded(tensor) for tensor in whole]
    for path in sorted(tag.iterdir()):
        content = path.read_bytes()
        for place in random.integers(len(content), size=13):
            changed = bytearray(content)
            changed[place] ^= 1 << int(random.integers(8))
            path.write_bytes(changed)
            try:
                values = [loaded(tensor) for _, tensor in deepspeed.read(tag).tensors()]
            except ValueError as error:
                assert path.name in str(error) or tag.name in str(error)
            else:  # between the entries, where nothing is
                assert all(same(value, other) for value, other in zip(values, expected, strict=True))
        path.write_bytes(content)


def test_a_directory_of_something_else_is_none_of_deepspeeds(tmp_path):
    (tmp_path / "latest").write_text("../..")
    (tmp_path / "a").mkdir()
    assert not any(deepspeed.detect(path) for path in (tmp_path, tmp_path / "a", tmp_path / "b"))
    (tmp_path / "a" / "mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "a" / "expp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    assert deepspeed.detect(tmp_path / "a")
    with pytest.raises(ValueError, match=r"expp_rank_0.*mixtures of experts"):
        deepspeed.read(tmp_path / "a")


# ---- anew, where deepspeed is installed ----

GROUPS_OF_CASES = 4


@pytest.mark.parametrize("part", range(GROUPS_OF_CASES))
@pytest.mark.timeout(600)
def test_checkpoints_written_anew_by_deepspeed_are_read(tmp_path, part):
    pytest.importorskip("deepspeed")
    names = [name for name in script().CASES][part::GROUPS_OF_CASES]
    problems = script().make(tmp_path, names)
    assert problems.keys() == set(names)
    for name, problem in problems.items():
        if name == "z3_nvme" and "async_io" in problem:
            continue  # needs libaio
        assert not problem, name
        state: PortableState = deepspeed.read(tmp_path / name / "checkpoint")
        compare(state, live(tmp_path / name), missing=LEFT_OUT.get(name, frozenset()))


def test_reading_imports_nothing_of_deepspeed(written):
    code = (
        "import sys; from pathlib import Path; from zero_strategy.convert import deepspeed\n"
        f"deepspeed.read(Path({str(written / 'z3_fp16' / 'checkpoint')!r}))\n"
        "assert not any(name.split('.')[0] == 'deepspeed' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
