"""A checkpoint read into a portable state and written again has the same files; what it says of itself stays."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.saving import random_tensor, same, save
from zero_strategy.checkpoint import CheckpointReader, TensorSpec
from zero_strategy.convert.portable import PortableState, StoredTensor, client_state_file, portable_of, write_portable

MODEL = {
    "half": random_tensor(torch.bfloat16, (5, 7), 5),
    "full": random_tensor(torch.float32, (7,), 6),
    "scalar": random_tensor(torch.float64, (), 7),
    "empty": torch.empty(0, 3),
    "last": random_tensor(torch.float16, (2, 3), 8),
}
ADAM = {
    kind: {name: random_tensor(torch.float32, tuple(MODEL[name].shape), seed) for seed, name in enumerate(names)}
    for kind, names in {"exp_avg": ["half", "full", "last"], "master": ["half", "last"]}.items()
}
RECORDS: dict[str, Any] = {
    "scalars": {"0": {"half": {"step": 7.0}, "full": {"step": 6.0}, "last": {"step": 7.0}}},
    "param_groups": {"0": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.999), "params": ["half", "full", "last"]}]},
    "counters": {"global_steps": 12},
    "user": {"mine": [1], "zero_strategy": {"scalar_dtypes": [{"step": "float32"}], "loss_scaler": {"scale": 4.0}}},
}


def tensor_files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*.safetensors*")}


@pytest.mark.parametrize("states", [{"0": ADAM}, {"0": ADAM, "1": {}, "2": {"exp_avg": ADAM["exp_avg"]}}, {}])
@pytest.mark.parametrize("limit", [60, 5_000_000_000])
def test_the_files_are_byte_identical(tmp_path: Path, limit: int, states: dict[str, Any]) -> None:
    aliases = {"tied": "half"}
    saved = tmp_path / "saved"
    groups = {"param_groups": {number: [{"lr": 1.0, "params": ["half"]}] for number in states}}
    save(saved, MODEL, states, world_size=3, aliases=aliases, max_file_bytes=limit, manifest=groups)
    write_portable(portable_of(CheckpointReader(saved)), tmp_path / "again", max_file_bytes=limit)
    assert tensor_files(saved) == tensor_files(tmp_path / "again")
    assert (saved / "model.safetensors.index.json").exists() == (limit == 60)
    assert CheckpointReader(tmp_path / "again").aliases == aliases


def test_records_come_back(tmp_path: Path) -> None:
    plain = {"seen": 3, "order": torch.arange(3), "when": (1, None)}
    save(tmp_path / "a", MODEL, {"0": ADAM}, manifest=RECORDS, extra_files={"rng/0.bin": b"\0\xff"})
    state = portable_of(CheckpointReader(tmp_path / "a"))
    state.client_state, state.lr_scheduler = plain, {"last_epoch": 4}
    write_portable(state, tmp_path / "b")
    again = portable_of(CheckpointReader(tmp_path / "b"))
    (optimizer,) = again.optimizers
    assert optimizer.scalars == RECORDS["scalars"]["0"] and optimizer.scalar_dtypes == {"step": "float32"}
    assert optimizer.param_groups == RECORDS["param_groups"]["0"]
    assert again.counters == RECORDS["counters"] and again.user == {"mine": [1]}
    assert again.loss_scaler == {"scale": 4.0} and again.extra_files == {"rng/0.bin": b"\0\xff"}
    assert again.lr_scheduler == {"last_epoch": 4} and again.client_state.keys() == plain.keys()
    assert torch.equal(again.client_state["order"], torch.arange(3))
    stored = torch.load(tmp_path / "b" / "client_state.pt", weights_only=True)
    assert stored["client_state"]["when"] == (1, None) and stored["lr_scheduler"] == {"last_epoch": 4}
    assert (tmp_path / "latest").read_text() == "a\n"


def test_tensors_are_loaded_one_at_a_time_and_once(tmp_path: Path) -> None:
    loads: Counter[str] = Counter()

    def tensor(name: str, value: torch.Tensor) -> StoredTensor:
        def load() -> torch.Tensor:
            loads[name] += 1
            return value

        return StoredTensor(TensorSpec.of(name, value), load)

    moved: list[int] = []
    state = PortableState({name: tensor(name, value) for name, value in MODEL.items()})
    write_portable(state, tmp_path / "c", progress=moved.append)
    assert loads == Counter(MODEL.keys()) and sum(moved) == sum(value.nbytes for value in MODEL.values())
    reader = CheckpointReader(tmp_path / "c")
    assert all(same(reader.full(name), value) for name, value in MODEL.items())


def test_a_tensor_that_is_not_what_it_was_said_to_be(tmp_path: Path) -> None:
    state = PortableState({"w": StoredTensor(TensorSpec("w", torch.float32, (3,)), lambda: torch.zeros(4))})
    with pytest.raises(ValueError, match=r"'w' was announced as torch.float32 \(3,\).*\(4,\)"):
        write_portable(state, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_client_state_that_only_a_pickle_could_hold() -> None:
    with pytest.raises(ValueError, match=r"client state 'bad' \(BytesIO\) is not plain data"):
        client_state_file(PortableState(client_state={"good": 1, "bad": io.BytesIO()}))
    assert client_state_file(PortableState()) == {}
