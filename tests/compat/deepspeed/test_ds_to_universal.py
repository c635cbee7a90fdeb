"""The converter with DeepSpeed's command line: model-parallel checkpoints into universal ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.convert.interop.parallel_files import KINDS, value
from tests.convert.interop.test_pipeline_layers import FLAT, INFO, pipeline, tensor_parallel
from zero_strategy.compat.deepspeed.checkpoint.ds_to_universal import main, parse_arguments
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.universal import read


def convert(source: Path, *more: str) -> Path:
    target = source.parent / "out"
    main(parse_arguments(["--input_folder", str(source), "--output_folder", str(target), *more]))
    return target


def test_a_tensor_parallel_checkpoint(tmp_path: Path) -> None:
    target = convert(tensor_parallel(tmp_path / "tag", 2, 2, torch.bfloat16), "--no_strict")
    assert (tmp_path / "latest_universal").read_text() == "out"
    layouts = {name: load_restricted(target / "zero" / name / "exp_avg.pt") for name in FLAT}
    for name, stored in layouts.items():
        assert torch.equal(stored.pop("param"), value("exp_avg", name, FLAT[name]))
    assert layouts == {
        "embed": {"cat_dim": 0, "vocab_tensor": True}, "col": {"cat_dim": 0}, "row": {"cat_dim": 1}, "norm": {},
        "bias": {"cat_dim": 0},
    }  # fmt: skip
    assert load_restricted(target / "mp_rank_00_model_states.pt")["universal_checkpoint_info"] == INFO
    state = read(tmp_path)
    for name, shape in FLAT.items():
        assert torch.equal(state.weights[name].load(), value("w", name, shape).bfloat16())
        assert torch.equal(state.optimizers[0].kinds["master"][name].load(), value("w", name, shape))
        for kind in KINDS:
            assert torch.equal(state.optimizers[0].kinds[kind][name].load(), value(kind, name, shape))


def test_ds_to_universal_pipeline(tmp_path: Path) -> None:
    whole = pipeline(tmp_path / "tag", 2, 1, torch.float32)
    convert(tmp_path / "tag", "--no_strict")
    found = read(tmp_path)
    for name, shape in whole.items():
        assert torch.equal(found.weights[name].load(), value("w", name, shape))


def test_patterns_that_match_nothing(tmp_path: Path) -> None:
    info = {**INFO, "parameter_to_average_patterns": ["no.such.name"]}
    source = tensor_parallel(tmp_path / "tag", 2, 1, torch.float32, universal_checkpoint_info=info)
    with pytest.raises(ValueError, match=r"match no parameter: \['no.such.name', .*--no_strict"):
        convert(source)
    convert(source, "--no_strict")
    assert read(tmp_path).counters["global_steps"] == 5


def test_missing_information(tmp_path: Path) -> None:
    source = tensor_parallel(tmp_path / "tag", 2, 1, torch.float32, universal_checkpoint_info=None)
    with pytest.raises(ValueError, match="no universal_checkpoint_info"):
        convert(source)
    convert(source, "--inject_missing_state")
    assert read(tmp_path).weights["norm"].spec.shape == (6,)  # as DeepSpeed has it: everything is joined
    with pytest.raises(ValueError, match="name the directory of one tag"):
        convert(tmp_path)
    with pytest.raises(ValueError, match="is not a directory"):
        convert(tmp_path / "nowhere")
