"""The layout of safetensors files is what the safetensors library reads."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from zero_strategy.checkpoint import CheckpointPlan, FileLayout, TensorSpec, plan_files
from zero_strategy.checkpoint.layout import DTYPES
from zero_strategy.checkpoint.plan import index_json

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
spec_lists = st.lists(
    st.builds(TensorSpec, st.text(max_size=8), st.sampled_from(list(DTYPES.values())[:-1]), shapes),
    max_size=8,
    unique_by=lambda spec: spec.name,
)


@given(spec_lists)
def test_tensors_are_aligned_contiguous_and_start_on_a_page(specs: list[TensorSpec]) -> None:
    layout = FileLayout.compute("f", specs)
    assert len(layout.header) % 4096 == 0
    assert int.from_bytes(layout.header[:8], "little") == len(layout.header) - 8
    end = len(layout.header)
    for spec in layout.specs.values():
        assert layout.offsets[spec.name] == end
        assert spec.numel == 0 or end % spec.dtype.itemsize == 0
        end += spec.nbytes
    assert end == layout.size
    assert set(layout.specs.values()) == set(specs)


@given(spec_lists)
def test_the_library_accepts_the_header(tmp_path_factory: pytest.TempPathFactory, specs: list[TensorSpec]) -> None:
    path = tmp_path_factory.getbasetemp() / "accepted.safetensors"
    layout = FileLayout.compute("f", specs, {"key": "value"})
    path.write_bytes(layout.header + bytes(layout.data_bytes))
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in load_file(path).items()}
    assert found == {spec.name: (spec.dtype, spec.shape) for spec in specs}


@given(spec_lists, st.integers(1, 400))
def test_files_hold_all_tensors_once_within_the_limit(specs: list[TensorSpec], limit: int) -> None:
    files = plan_files(specs, limit)
    assert [name for layout in files for name in layout.specs] != [] or not specs
    assert sorted(name for layout in files for name in layout.specs) == sorted(spec.name for spec in specs)
    for layout in files:
        assert layout.data_bytes <= limit or sum(spec.nbytes > 0 for spec in layout.specs.values()) == 1


def test_file_names_and_index_are_those_of_hugging_face() -> None:
    specs = [TensorSpec(name, torch.float32, (4,)) for name in "abc"]
    assert [layout.path for layout in plan_files(specs, 48)] == ["model.safetensors"]
    files = plan_files(specs, 32)
    assert [layout.path for layout in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    index = json.loads(index_json(files))
    assert index["metadata"] == {"total_size": 48}
    assert index["weight_map"] == {"a": files[0].path, "b": files[0].path, "c": files[1].path}


def test_state_paths_depend_on_the_number_of_optimizers() -> None:
    kinds = {"exp_avg": [TensorSpec("a", torch.float32, (4,))]}
    one = CheckpointPlan.build([], {"adam": kinds})
    two = CheckpointPlan.build([], {"adam": kinds, "1": kinds})
    assert one.state_paths("adam") == {"exp_avg": "optimizer/exp_avg.safetensors"}
    assert two.state_paths("1") == {"exp_avg": "optimizer/1/exp_avg.safetensors"}


def test_mistakes_in_specs_are_named(tmp_path: Path) -> None:
    a = TensorSpec("a", torch.float32, (4,))
    with pytest.raises(ValueError, match="'a' appears twice"):
        plan_files([a, a], 100)
    with pytest.raises(ValueError, match="duplicate tensors"):
        FileLayout.compute("f", [a, a])
    with pytest.raises(TypeError, match=r"'q'.*complex128"):
        TensorSpec("q", torch.complex128, ())
    with pytest.raises(ValueError, match="__metadata__"):
        TensorSpec("__metadata__", torch.float32, ())
    with pytest.raises(ValueError, match="max_file_bytes"):
        plan_files([a], 0)
    with pytest.raises(ValueError, match="alias 'b' points to 'c'"):
        CheckpointPlan.build([a], aliases={"b": "c"})
    with pytest.raises(ValueError, match="'a' is both"):
        CheckpointPlan.build([a], aliases={"a": "a"})
    with pytest.raises(ValueError, match=r"'\.\./x' cannot name"):
        CheckpointPlan.build([a], {"adam": {"../x": [a]}})
    with pytest.raises(TypeError, match="metadata"):
        plan_files([a], 100, metadata={"epoch": 1})  # type: ignore[dict-item]
