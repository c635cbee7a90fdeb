"""Every changed bit is found, by loading and by `verify`, and named; readers of parts read whole blocks."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.kinds import content, files_of, make
from tests.checkpoint.saving import random_tensor, same, save
from tests.convert.foreign import trained
from zero_strategy.checkpoint import CheckpointReader, ranges
from zero_strategy.cli import main
from zero_strategy.cli.checkpoint_checks import verify

MODEL = {"first": random_tensor(torch.float32, (7, 30)), "second": random_tensor(torch.bfloat16, (401,), 1)}
STATES = {"0": {"exp_avg": {"first": random_tensor(torch.float32, (7, 30), 2)}}}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "BLOCK_BYTES", 256)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path / "c", MODEL, STATES, world_size=3, extra_files={"notes/a.txt": b"something"}, max_file_bytes=850)
    return tmp_path / "c"


def load_everything(directory: Path) -> None:
    reader = CheckpointReader(directory)
    for name in reader.weights:
        reader.full(name)
    for optimizer in reader.manifest.optimizers:
        for kind, specs in reader.states(optimizer).items():
            for name in specs:
                reader.full(name, (optimizer, kind))
    for path in reader.manifest.files:
        reader.extra(path)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_200_changed_bits_are_all_found(checkpoint: Path, tmp_path: Path) -> None:
    load_everything(checkpoint)
    assert verify(checkpoint).problems == ()
    generator = random.Random(0)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    for number in range(200):
        copy = tmp_path / str(number)
        shutil.copytree(checkpoint, copy)
        file = copy / generator.choice(files).relative_to(checkpoint)
        flip(file, generator.randrange(8 * file.stat().st_size))
        with pytest.raises(ValueError, match=file.name):
            load_everything(copy)
        if file.name != "manifest.json":
            problems = verify(copy).problems
            assert len(problems) == 1 and str(file) in problems[0]
        shutil.rmtree(copy)


def test_the_damaged_tensor_is_named(checkpoint: Path) -> None:
    file = checkpoint / CheckpointReader(checkpoint).manifest.weights["second"].file
    flip(file, 8 * file.stat().st_size - 1)
    reader = CheckpointReader(checkpoint)
    with pytest.raises(ValueError, match=rf"{file.name}: tensor 'second' is damaged: elements \[\d+, 401\)"):
        reader.full("second")
    assert same(reader.full("first"), MODEL["first"])
    assert same(reader.read("second", 0, 10), MODEL["second"][:10])  # another block
    assert "tensor 'second'" in verify(checkpoint).problems[0]
    unchecked = CheckpointReader(checkpoint, verify=False).full("second")
    assert not same(unchecked, MODEL["second"])


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_any_part_is_read_through_whole_blocks(checkpoint: Path, chunk: int) -> None:
    reader = CheckpointReader(checkpoint, chunk_bytes=chunk)
    for name, tensor in MODEL.items():
        flat = tensor.reshape(-1)
        for start in (0, 1, 63, 64, 65, 130, flat.numel()):
            for stop in (start, start + 1, start + 64, flat.numel()):
                if start <= stop <= flat.numel():
                    assert same(reader.read(name, start, stop), flat[start:stop])


def test_blocks_end_at_the_same_places_for_any_slices() -> None:
    assert list(ranges.blocks_of(0, 200, 4)) == [(0, 64), (64, 128), (128, 192), (192, 200)]
    assert list(ranges.blocks_of(100, 150, 4)) == [(100, 128), (128, 150)]
    assert list(ranges.blocks_of(5, 5, 4)) == []


def _swap(directory: Path) -> None:
    a, b = (directory / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "count", "message"),
    [
        (lambda d: (d / "notes" / "a.txt").unlink(), 1, "notes/a.txt: is missing"),
        (lambda d: (d / "notes" / "b.txt").write_text("x"), 1, "notes/b.txt: the manifest does not list it"),
        (lambda d: (d / "notes" / "a.txt").write_text("x"), 1, "notes/a.txt: has 1 bytes, the manifest says 9"),
        (lambda d: (d / "optimizer" / "exp_avg.safetensors").write_bytes(b""), 1, "has 0 bytes"),
        (_swap, 2, "model-00001-of-00002.safetensors"),
    ],
)
def test_verify_lists_everything_that_is_wrong(
    checkpoint: Path, spoil: Callable[[Path], object], count: int, message: str
) -> None:
    spoil(checkpoint)
    problems = verify(checkpoint).problems
    assert len(problems) == count and message in problems[0]


def test_the_command(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(checkpoint)]) == 0
    assert "c: whole (" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(checkpoint.parent), "--json"]) == 0  # by `latest`
    assert json.loads(capsys.readouterr().out)["problems"] == []
    (checkpoint / "notes" / "a.txt").write_bytes(b"Something")
    assert main(["checkpoint", "verify", str(checkpoint)]) == 1
    said = capsys.readouterr().out
    assert "notes/a.txt: is damaged" in said and "1 problem(s)" in said
    assert main(["checkpoint", "verify", str(checkpoint / "nothing")]) == 2
    assert "no such file or directory" in capsys.readouterr().err
    flip(checkpoint / "manifest.json", 800)
    assert main(["checkpoint", "verify", str(checkpoint), "--json"]) == 2
    assert "manifest.json" in json.loads(capsys.readouterr().out)["problems"][0]


@pytest.mark.parametrize("kind", ["torch", "lightning", "lightning_folder", "dcp", "accelerate", "universal"])
def test_a_flipped_bit_in_a_tensor_of_a_foreign_file(tmp_path: Path, kind: str) -> None:
    """It is found when a checkpoint is read: `convert` must not seal it with checksums of its own."""
    place, tried = make(kind, tmp_path), 0
    weights = [tensor.numpy().tobytes() for tensor in trained()[0].state_dict().values()]
    for file in files_of(place):
        whole = file.read_bytes()
        for data in weights:
            if len(data) < 32 or data not in whole:
                continue
            tried += 1
            flip(file, 8 * (whole.index(data) + len(data) // 2) + 6)
            with pytest.raises(ValueError, match=f"{file.name}.*damaged"):
                content(place)
            assert main(["checkpoint", "convert", str(place), str(tmp_path / "new"), "--quiet"]) == 2
            assert not (tmp_path / "new").exists()
            file.write_bytes(whole)
    content(place)
    assert tried
