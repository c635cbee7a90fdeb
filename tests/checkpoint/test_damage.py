"""Damaged checkpoints are refused with the name of the file and of what is wrong in it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.saving import plan_of, save
from zero_strategy.checkpoint import CheckpointReader, Manifest
from zero_strategy.checkpoint.manifest import seal
from zero_strategy.checkpoint.ranges import Block, Checksums

MODEL = {"first": torch.arange(6.0).view(2, 3), "second": torch.arange(5.0)}
STATES = {"adam": {"exp_avg": {"first": torch.ones(2, 3)}}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path / "c", MODEL, STATES, manifest={"counters": {"step": 1}})
    return tmp_path / "c"


def plain(checkpoint: Path) -> Path:
    """The weights file alone, where no manifest gives away the damage."""
    return (checkpoint / "model.safetensors").rename(checkpoint.parent / "alone.safetensors")


def with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["second"].update(dtype="F12"), "'second' has the unknown dtype 'F12'"),
        (lambda h: h["second"].update(shape=[7]), "'second'.*takes 28 bytes"),
        (lambda h: h["second"].update(shape=[-5]), "'second' has the malformed shape"),
        (lambda h: h["second"].update(shape=[5.0]), "'second' has the malformed shape"),
        (lambda h: h["second"].update(data_offsets=[28, 48]), "'second' leaves a hole"),
        (lambda h: h["second"].update(data_offsets=[20, 40]), "'second' overlaps"),
        (lambda h: h["second"].pop("dtype"), "'second' must have dtype"),
        (lambda h: h.pop("second"), "20 bytes after its last tensor"),
        (lambda h: h.update(__metadata__={"a": 1}), "__metadata__"),
        (
            lambda h: h.update(third={"dtype": "F32", "shape": [1], "data_offsets": [44, 48]}),
            "truncated.*'third'",
        ),
    ],
)
def test_corrupt_headers(checkpoint: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    path = plain(checkpoint)
    with_header(path, change)
    with pytest.raises(ValueError, match=f"alone.safetensors.*{message}"):
        CheckpointReader(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 20, "not a safetensors file"),
        ((100).to_bytes(8, "little") + b"{}", "truncated inside its header"),
        ((4).to_bytes(8, "little") + b"[{}]", "no JSON object"),
        ((4).to_bytes(8, "little") + b"{..}", "not valid JSON"),
        ((16).to_bytes(8, "little") + b'{"a":{}, "a":{}}', "'a' appears twice"),
    ],
)
def test_files_that_are_not_safetensors(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"x.safetensors.*{message}"):
        CheckpointReader(tmp_path / "x.safetensors")


@given(st.data())
def test_any_damage_to_a_header_is_an_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    layout = plan_of(MODEL).weights[0]
    content = bytearray(layout.header.rstrip() + bytes(4))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content.ljust(len(layout.header)) + bytes(layout.data_bytes))
    try:
        reader = CheckpointReader(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        for name in reader.weights:
            reader.full(name)


def test_truncated_data_names_the_tensor(checkpoint: Path) -> None:
    path = plain(checkpoint)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"alone.safetensors: truncated: tensor 'second'"):
        CheckpointReader(path)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer/exp_avg.safetensors"])
def test_files_of_another_size_or_missing(checkpoint: Path, file: str) -> None:
    size = (checkpoint / file).stat().st_size
    os.truncate(checkpoint / file, size - 1)
    with pytest.raises(ValueError, match=f"{file} has {size - 1} bytes, the manifest says {size}"):
        CheckpointReader(checkpoint)
    (checkpoint / file).unlink()
    with pytest.raises(ValueError, match=f"{file} is missing"):
        CheckpointReader(checkpoint)


def test_without_its_manifest_it_is_no_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    for path in (checkpoint, checkpoint.parent):
        with pytest.raises(ValueError, match="not a complete checkpoint"):
            CheckpointReader(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="other"), "format is 'other'"),
        (lambda m: m.update(version=3), "version 3"),
        (lambda m: m.pop("weights"), r"lacks \['weights'\]"),
        (lambda m: m.update(new=1), r"unknown keys \['new'\]"),
        (lambda m: m["weights"].pop("first"), r"does not list \['first'\]"),
        (lambda m: m["weights"]["first"].update(shape=[3, 2]), "'first' is torch.float32"),
        (lambda m: m["weights"]["first"].update(dtype="F99"), "weights.first has the unknown dtype"),
        (lambda m: m["weights"]["first"].update(file="x"), "weight 'first' is in 'x'"),
        (lambda m: m["weights"].update(third=m["weights"]["first"]), "no tensor 'third'"),
        (lambda m: m["files"].update({"../x": 1}), "not a path inside"),
        (lambda m: m["files"].update(x=-1), "files.x is -1"),
        (lambda m: m["checksums"]["files"].pop("model.safetensors"), r"a file without a checksum: \['model"),
        (lambda m: m["checksums"]["files"].update({"model.safetensors": "x"}), "16 hexadecimal digits"),
        (lambda m: m["checksums"]["tensors"]["model.safetensors"].pop("first"), "'first' end at element 0 of 6"),
        (lambda m: m["checksums"]["tensors"].pop("optimizer/exp_avg.safetensors"), "exp_avg.*'first' end at element 0"),
        (lambda m: m["checksums"]["tensors"]["model.safetensors"].update(x=[]), r"does not have: \['x'\]"),
        (lambda m: m["checksums"]["tensors"]["model.safetensors"].update(first=[1]), "malformed entry 1"),
        (lambda m: m["aliases"].update(a="nope"), "alias 'a' of 'nope'"),
        (lambda m: m["optimizers"]["adam"]["states"].update(exp_avg="y"), "state 'exp_avg'.*'y'"),
        (lambda m: m["optimizers"]["adam"].update(param_groups=[1]), "param_groups"),
        (lambda m: m["counters"].update(step=[1]), "counters.step"),
        (lambda m: m["counters"].update(step={"$float": "x"}), "counters.step"),
        (lambda m: m.update(stage="3"), "stage is '3'"),
    ],
)
def test_manifests_that_are_wrong(checkpoint: Path, change: Callable[[Any], object], message: str) -> None:
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_bytes(seal(json.dumps(content).encode()))
    with pytest.raises(ValueError, match=message) as error:
        CheckpointReader(checkpoint)
    assert str(checkpoint) in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN}', "\xff"])
def test_manifests_that_are_no_objects(checkpoint: Path, text: str) -> None:
    (checkpoint / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"manifest.json: (not valid JSON|holds a JSON list)"):
        CheckpointReader(checkpoint)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"user": {"a": {1: 2}}}, TypeError, r"user.a has the key 1"),
        ({"user": {"a": [{"b": torch.ones(1)}]}}, TypeError, r"user.a\[0\].b has type Tensor"),
        ({"user": {"$float": "1"}}, ValueError, "reserved"),
        ({"counters": {"step": (1, 2)}}, ValueError, "counters.step"),
        ({"counters": {"step": b"1"}}, TypeError, "counters.step has type bytes"),
        ({"stage": -1}, ValueError, "stage is -1"),
    ],
)
def test_what_json_cannot_hold_is_refused_when_saving(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Manifest(files={}, weights={}, **fields).to_json()


def test_a_manifest_reads_back_equal() -> None:
    checksums = Checksums({"a/b": "0" * 16}, {"a": {"t": [Block(0, 3, "1" * 16)]}})
    user = {"x": (1, [2.5, float("inf")], {"y": -0.0})}
    manifest = Manifest(files={"a/b": 3}, weights={}, checksums=checksums, user=user)
    again = Manifest.from_json(manifest.to_json(), "test")
    assert again == manifest
    assert str(again.user) == str(manifest.user)
