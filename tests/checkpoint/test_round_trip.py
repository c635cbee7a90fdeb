"""Saved state comes back, to us and to the safetensors library, whatever the number of ranks."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.checkpoint.saving import all_dtypes, bits, plan_of, random_tensor, same, save
from tests.warm import run_warm
from zero_strategy.checkpoint import CheckpointReader, CheckpointWriter, Piece, TensorSpec, disk
from zero_strategy.runtime import host_bytes as transfer

ADAM = {
    "adam": {
        "exp_avg": {"w": random_tensor(torch.float32, (5, 7), 1), "b": random_tensor(torch.float32, (7,), 2)},
        "codes": {"w": random_tensor(torch.uint8, (35,), 3), "b": random_tensor(torch.int16, (), 4)},
    }
}
MODEL = {"w": random_tensor(torch.bfloat16, (5, 7), 5), "b": random_tensor(torch.float32, (7,), 6)}


def contents(directory: Path) -> dict[str, bytes]:
    """All files; of the manifest all but the blocks' checksums, which say how the elements were divided."""
    found = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    manifest = json.loads(found["manifest.json"])
    del manifest["checksum"], manifest["checksums"]["tensors"]
    return found | {"manifest.json": json.dumps(manifest).encode()}


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_dtype_and_degenerate_shape(tmp_path: Path, world_size: int) -> None:
    tensors = all_dtypes() | {
        "scalar": random_tensor(torch.float64, ()),
        "empty": torch.empty(0, 3, dtype=torch.int32),
        "flag": torch.tensor(True),
        "empty.half": torch.empty(2, 0, dtype=torch.float16),
    }
    save(tmp_path / "c", tensors, world_size=world_size)
    reader = CheckpointReader(tmp_path / "c")
    library = load_file(tmp_path / "c" / "model.safetensors")
    assert library.keys() == tensors.keys() == reader.weights.keys()
    for name, tensor in tensors.items():
        assert same(reader.full(name), tensor)
        assert same(library[name], tensor)
        assert reader.weights[name] == TensorSpec.of(name, tensor)


def test_optimizer_state_and_records(tmp_path: Path) -> None:
    third = 1 / 3
    records: dict[str, Any] = {
        "scalars": {"adam": {"w": {"step": 7.0, "mu": third}, "b": {"step": 3, "nan": float("-inf")}}},
        "param_groups": {"adam": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "params": ["w", "b"]}]},
        "counters": {"global_step": 12, "finished": False},
        "user": {"note": None, "nested": {"list": [1, 1.0, "x", (1,)]}},
        "world_size": 2,
        "stage": 3,
    }
    save(tmp_path / "c", MODEL, ADAM, manifest=records, extra_files={"rng/rank0.bin": b"\x00\xff"})
    reader = CheckpointReader(tmp_path / "c")
    entry = reader.manifest.optimizers["adam"]
    assert entry.scalars == records["scalars"]["adam"]
    assert type(entry.scalars["w"]["step"]) is float and type(entry.scalars["b"]["step"]) is int
    assert entry.param_groups == records["param_groups"]["adam"]
    assert reader.manifest.user == records["user"]
    assert reader.manifest.counters == records["counters"]
    assert (reader.manifest.world_size, reader.manifest.stage) == (2, 3)
    assert reader.extra("rng/rank0.bin") == b"\x00\xff"
    assert reader.states("adam").keys() == {"exp_avg", "codes"}
    for kind, tensors in ADAM["adam"].items():
        for name, tensor in tensors.items():
            assert reader.states("adam")[kind][name] == TensorSpec.of(name, tensor)
            assert same(reader.full(name, kind=("adam", kind)), tensor)


def test_an_optimizer_without_tensors_is_recorded(tmp_path: Path) -> None:
    save(tmp_path / "c", MODEL, manifest={"param_groups": {"sgd": [{"lr": 0.1}]}})
    reader = CheckpointReader(tmp_path / "c")
    assert reader.states("sgd") == {}
    assert reader.manifest.optimizers["sgd"].param_groups == [{"lr": 0.1}]


@pytest.mark.parametrize("max_file_bytes", [40, 10**9])
def test_bytes_do_not_depend_on_the_number_of_ranks(tmp_path: Path, max_file_bytes: int) -> None:
    saved = []
    for world_size in (1, 2, 3, 4):
        directory = tmp_path / str(world_size)
        save(directory, MODEL, ADAM, world_size=world_size, max_file_bytes=max_file_bytes)
        saved.append(contents(directory))
    assert saved[0] == saved[1] == saved[2] == saved[3]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut_gives_the_same_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("cut")
    with pytest.MonkeyPatch.context() as monkeypatch:
        check_any_cut(root, data, monkeypatch)


def check_any_cut(root: Path, data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        "wide": random_tensor(torch.float64, (3, 5), 1),
        "byte": random_tensor(torch.uint8, (13,), 2),
        "half": random_tensor(torch.float16, (2, 2, 3), 3),
        "none": torch.empty(0),
        "one": random_tensor(torch.int64, (), 4),
    }
    limit = data.draw(st.sampled_from([50, 1000]))
    plan = plan_of(tensors, max_file_bytes=limit)
    world_size = data.draw(st.integers(1, 4))
    chunk = data.draw(st.sampled_from([1, 3, 64, 8192]))
    writers = [CheckpointWriter(root / "c", rank=r, world_size=world_size) for r in range(world_size)]
    for writer in writers:
        writer.prepare(plan)
    monkeypatch.setattr(disk, "CHUNK_BYTES", chunk)
    pieces = []
    for name, tensor in tensors.items():
        cuts = sorted(data.draw(st.lists(st.integers(0, tensor.numel()), max_size=5)))
        bounds = [0, *cuts, tensor.numel()]
        pieces += [Piece(name, a, tensor.reshape(-1)[a:b]) for a, b in pairwise(bounds)]
    for piece in data.draw(st.permutations(pieces)):
        writers[data.draw(st.integers(0, world_size - 1))].write("model", [piece])
    for writer in writers:
        writer.commit(plan.manifest(world_size=1, stage=0))
    save(root / "reference", tensors, world_size=1, max_file_bytes=limit)
    assert contents(root / "c") == contents(root / "reference")


def test_tensors_of_other_devices_go_through_a_bounded_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_on_host", lambda tensor: False)
    test_any_range_of_a_parameter_that_requires_grad(tmp_path, chunk_bytes=10)


@pytest.mark.parametrize("chunk_bytes", [7, 1 << 20])
def test_any_range_of_a_parameter_that_requires_grad(tmp_path: Path, chunk_bytes: int) -> None:
    parameter = torch.nn.Parameter(torch.randn(5, 7))
    plan = plan_of({"w": parameter})
    writer = CheckpointWriter(tmp_path / "c", rank=0, world_size=1)
    writer.prepare(plan)
    writer.write("model", [Piece("w", 0, parameter.view(-1))])
    writer.commit(plan.manifest(world_size=1, stage=0))
    reader = CheckpointReader(tmp_path / "c", chunk_bytes=chunk_bytes)
    out = torch.nn.Parameter(torch.zeros(20))
    assert same(reader.read("w", 3, 23, out=out).detach(), parameter.detach().view(-1)[3:23])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_gpu(tmp_path: Path) -> None:
    tensors = {name: tensor.cuda() for name, tensor in MODEL.items()}
    plan = plan_of(tensors)
    writer = CheckpointWriter(tmp_path / "c", rank=0, world_size=1)
    writer.prepare(plan)
    writer.write("model", [Piece(name, 0, tensor.view(-1)) for name, tensor in tensors.items()])
    writer.commit(plan.manifest(world_size=1, stage=0))
    reader = CheckpointReader(tmp_path / "c", chunk_bytes=24)
    for name, tensor in MODEL.items():
        out = torch.zeros(tensor.numel(), dtype=tensor.dtype, device="cuda")
        assert same(reader.read(name, out=out).cpu().view(tensor.shape), tensor)


def test_several_files_have_an_index(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": random_tensor(torch.float32, (10,), i) for i in range(5)}
    save(tmp_path / "c", tensors, max_file_bytes=80)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert same(load_file(tmp_path / "c" / file)[name], tensors[name])


def test_aliases_are_stored_once_and_named(tmp_path: Path) -> None:
    save(tmp_path / "c", MODEL, ADAM, aliases={"head.w": "w"})
    with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["aliases"]) == {"head.w": "w"}
        assert file.metadata()["format"] == "pt"
        assert set(file.keys()) == {"w", "b"}
    for path in (tmp_path / "c", tmp_path / "c" / "model.safetensors"):
        reader = CheckpointReader(path)
        assert reader.aliases == {"head.w": "w"}
        assert same(reader.full("head.w"), MODEL["w"])
    reader = CheckpointReader(tmp_path / "c")
    assert same(reader.full("head.w", kind=("adam", "exp_avg")), ADAM["adam"]["exp_avg"]["w"])


@given(st.integers(0, 35), st.integers(0, 35), st.sampled_from([1, 7, 1 << 20]))
def test_any_range_reads(shared_checkpoint: Path, a: int, b: int, chunk: int) -> None:
    start, stop = min(a, b), max(a, b)
    reader = CheckpointReader(shared_checkpoint, chunk_bytes=chunk)
    expected = MODEL["w"].reshape(-1)[start:stop]
    assert same(reader.read("w", start, stop), expected)
    buffer = torch.zeros(40, dtype=torch.bfloat16)
    out = buffer[2 : 2 + stop - start]
    assert reader.read("w", start, stop, out=out) is out
    assert same(buffer[2 : 2 + stop - start], expected)
    assert not any(bits(buffer[2 + stop - start :])) and not any(bits(buffer[:2]))


@pytest.fixture(scope="module")
def shared_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared") / "c"
    save(directory, MODEL, ADAM)
    return directory


def test_mistakes_in_reading_are_named(shared_checkpoint: Path) -> None:
    reader = CheckpointReader(shared_checkpoint)
    with pytest.raises(ValueError, match=r"\[30, 36\).*'w'"):
        reader.read("w", 30, 36)
    with pytest.raises(ValueError, match="no tensor 'nope'"):
        reader.read("nope")
    with pytest.raises(ValueError, match="no optimizer 'sgd'"):
        reader.states("sgd")
    with pytest.raises(ValueError, match="no state 'momentum'"):
        reader.read("w", kind=("adam", "momentum"))
    with pytest.raises(ValueError, match="no file 'nope'"):
        reader.extra("nope")
    with pytest.raises(TypeError, match=r"'w' is stored as torch\.bfloat16"):
        reader.read("w", out=torch.empty(35))
    with pytest.raises(TypeError, match="1-D"):
        reader.read("w", out=torch.empty(5, 7, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="has 3"):
        reader.read("w", out=torch.empty(3, dtype=torch.bfloat16))


def test_check_against_lists_everything_at_once(tmp_path: Path) -> None:
    save(tmp_path / "c", MODEL | {"old": torch.zeros(2), "tied": torch.zeros(0)}, aliases={"alias": "tied"})
    reader = CheckpointReader(tmp_path / "c")
    ours = [TensorSpec("w", torch.float32, (5, 7)), TensorSpec("alias", torch.float32, (0,))]
    reader.check_against([*ours, TensorSpec.of("b", MODEL["b"]), TensorSpec("old", torch.float32, (2,))])
    with pytest.raises(ValueError) as error:
        reader.check_against([*ours, TensorSpec("b", torch.float32, (8,)), TensorSpec("new", torch.float32, ())])
    assert "missing (1): new" in str(error.value)
    assert "unexpected (1): old" in str(error.value)
    assert "wrong shape (1): b (checkpoint (7,), model (8,))" in str(error.value)


def test_plain_weights_of_other_tools_open(tmp_path: Path) -> None:
    save_file(MODEL, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        reader = CheckpointReader(path)
        assert not reader.has_manifest
        assert all(same(reader.full(name), tensor) for name, tensor in MODEL.items())
        with pytest.raises(ValueError, match="plain weights"):
            _ = reader.manifest


def test_sharded_hugging_face_directory_opens(tmp_path: Path) -> None:
    for name, tensor in MODEL.items():
        save_file({name: tensor}, tmp_path / f"part-{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {name: f"part-{name}.safetensors" for name in MODEL}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    reader = CheckpointReader(tmp_path)
    assert all(same(reader.full(name), tensor) for name, tensor in MODEL.items())
    index.write_text(json.dumps({"weight_map": weight_map | {"extra": "part-w.safetensors"}}))
    with pytest.raises(ValueError, match=r"part-w\.safetensors: has no tensor 'extra'"):
        CheckpointReader(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "../evil.safetensors"}}))
    with pytest.raises(ValueError, match="not the path of a file beside it"):
        CheckpointReader(tmp_path)


def test_weights_need_only_torch_and_safetensors(tmp_path: Path) -> None:
    save(tmp_path / "c", MODEL, aliases={"head.w": "w"})
    torch.save(dict(MODEL), tmp_path / "expected.pt")
    script = """
import json, sys, torch
from safetensors import safe_open
from safetensors.torch import load_file
root = sys.argv[1]
state = load_file(root + "/c/model.safetensors")
with safe_open(root + "/c/model.safetensors", "pt") as file:
    for alias, name in json.loads(file.metadata()["aliases"]).items():
        state[alias] = state[name]
for name, tensor in torch.load(root + "/expected.pt").items():
    assert torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8)), name
assert state["head.w"] is state["w"]
assert not any(module.startswith("zero_strategy") for module in sys.modules)
"""
    done = run_warm(script, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
