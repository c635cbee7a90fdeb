"""A portable state reads like the checkpoint that it came from, for the engine, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import same, save
from tests.convert.test_portable import ADAM, MODEL, RECORDS
from tests.engine.nets import loss_of, net
from zero_strategy.checkpoint import CheckpointReader, TensorSpec
from zero_strategy.config import load_config
from zero_strategy.convert.convert import foreign_format, open_any, state_of
from zero_strategy.convert.portable import PortableReader, portable_of
from zero_strategy.engine import ZeroEngine


@pytest.fixture
def both(tmp_path: Path) -> tuple[CheckpointReader, PortableReader]:
    files = {"notes.txt": b"hello"}
    save(tmp_path / "c", MODEL, {"0": ADAM}, manifest=RECORDS, extra_files=files, aliases={"tied": "half"})
    reader = CheckpointReader(tmp_path / "c")
    return reader, PortableReader(portable_of(reader), tmp_path / "c")


def test_it_reads_the_same(both: tuple[CheckpointReader, PortableReader]) -> None:
    real, portable = both
    assert dict(portable.weights) == dict(real.weights) and portable.aliases == real.aliases == {"tied": "half"}
    assert portable.states("0") == {kind: dict(specs) for kind, specs in real.states("0").items()}
    for name in [*MODEL, "tied"]:
        assert same(portable.full(name), real.full(name)) and portable.spec(name) == real.spec(name)
    for name in ADAM["master"]:
        kind = ("0", "master")
        assert same(portable.read(name, 2, 5, kind=kind), real.read(name, 2, 5, kind=kind))
    assert portable.extra("notes.txt") == b"hello"
    for entry in ("counters", "user", "aliases"):
        assert getattr(portable.manifest, entry) == getattr(real.manifest, entry)
    assert portable.manifest.optimizers["0"].scalars == real.manifest.optimizers["0"].scalars
    assert portable.manifest.optimizers["0"].param_groups == real.manifest.optimizers["0"].param_groups


def test_it_refuses_the_same(both: tuple[CheckpointReader, PortableReader]) -> None:
    for reader in both:
        with pytest.raises(ValueError, match="has no tensor 'other'"):
            reader.read("other")
        with pytest.raises(ValueError, match=r"elements \[3, 99\) are not within tensor 'full'"):
            reader.read("full", 3, 99)
        with pytest.raises(ValueError, match="has no optimizer '1'"):
            reader.states("1")
        with pytest.raises(ValueError, match=r"state.*'nothing'"):
            reader.read("half", kind=("0", "nothing"))
        with pytest.raises(ValueError, match=r"no file 'x'"):
            reader.extra("x")
        with pytest.raises(TypeError, match=r"'full' is stored as torch.float32, out has torch.int32"):
            reader.read("full", out=torch.empty(7, dtype=torch.int32))
        with pytest.raises(ValueError, match="missing \\(1\\): more"):
            reader.check_against([TensorSpec("more", torch.float32, (1,))])


def test_the_engine_goes_on_from_it(tmp_path: Path) -> None:
    def make() -> tuple[ZeroEngine, torch.optim.Optimizer]:
        engine = ZeroEngine(net(seed=len(made)), load_config(stage=3), compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(engine.module.parameters(), lr=0.1, weight_decay=0.1 * len(made))
        engine.attach(optimizer)
        made.append(engine)
        return engine, optimizer

    def step(engine: ZeroEngine, optimizer: torch.optim.Optimizer, seed: int) -> float:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).bfloat16()
        loss = loss_of(engine.module(inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    made: list[ZeroEngine] = []
    first, optimizer = make()
    step(first, optimizer, 0)
    first.save(tmp_path / "c")
    expected = [step(first, optimizer, 1), step(first, optimizer, 2)]
    second, other = make()
    reader = PortableReader(portable_of(CheckpointReader(tmp_path / "c")), tmp_path / "c")
    second.load_weights(reader)
    second.load_optimizers(reader)
    assert [step(second, other, 1), step(second, other, 2)] == expected


def test_ours_are_ours(tmp_path: Path) -> None:
    save(tmp_path / "c", MODEL)
    for path in (tmp_path / "c", tmp_path, tmp_path / "c" / "model.safetensors"):
        assert foreign_format(path) is None
        assert isinstance(open_any(path), CheckpointReader)
    assert state_of(open_any(tmp_path)).weights.keys() == MODEL.keys()
    with pytest.raises(ValueError, match="no such file"):
        open_any(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"unknown checkpoint format 'x'; known: .*dcp"):
        open_any(tmp_path, source="x")


def test_names_that_torch_compile_has_changed_are_told(tmp_path: Path) -> None:
    part = torch.compile(torch.nn.Linear(2, 1), backend="eager")
    assert isinstance(part, torch.nn.Module)
    save(tmp_path / "c", {f"part.{name}": tensor for name, tensor in part.state_dict().items()})
    wanted = [TensorSpec("part.weight", torch.float32, (1, 2)), TensorSpec("part.bias", torch.float32, (1,))]
    with pytest.raises(ValueError, match=r"differ by torch.compile's `_orig_mod.` alone: .*`part.compile\(\)`"):
        CheckpointReader(tmp_path / "c").check_against(wanted)


def test_ties_and_empty_tensors_are_marked_among_what_does_not_fit(tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": torch.ones(2), "none": torch.empty(0)}, aliases={"head": "w"})
    wanted = [TensorSpec("x", torch.float32, (3,)), TensorSpec("nothing", torch.float32, (0, 2))]
    with pytest.raises(ValueError, match="not a checkpoint of this model") as caught:
        CheckpointReader(tmp_path / "c").check_against(wanted, {"y": "x"})
    message = str(caught.value)
    assert "missing (2): x (tied to y), nothing (no elements)" in message
    assert "unexpected (2): w (tied to head), none (no elements)" in message
