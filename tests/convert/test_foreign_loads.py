"""The engine loads what other libraries saved: directories, files, untied ties, optimizers without names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.convert.foreign import adamw, build, step, trained
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def save_foreign(kind: str, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    path.mkdir(parents=True)
    if kind == "torch":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "x.pt")
    elif kind == "dcp":
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path / "x.pt", no_dist=True)
    else:  # plain Accelerate: sorted names, a tied tensor under its last name, numbers
        (path / "x.pt").mkdir()
        save_model(model, str(path / "x.pt" / "model.safetensors"))
        torch.save(optimizer.state_dict(), path / "x.pt" / "optimizer.bin")
        torch.save({}, path / "x.pt" / "random_states_0.pkl")


def go_on(path: str, stage: int) -> list[float]:
    """Two further steps; every rank sees the whole batch, so that the result is that of one process."""
    model = build(seed=1)
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}))
    optimizer = adamw(model)
    engine.attach(optimizer)
    engine.load(path)
    return [step(model, optimizer, number) for number in (3, 4)]


@pytest.mark.parametrize("kind", ["torch", "dcp", "accelerate"])
def test_it_goes_on_where_plain_torch_was(ranks: Launcher, tmp_path: Path, kind: str) -> None:
    model, optimizer = trained()
    save_foreign(kind, tmp_path / "saved", model, optimizer)
    expected = [step(model, optimizer, number) for number in (3, 4)]
    assert go_on(str(tmp_path / "saved" / "x.pt"), 0) == expected
    if kind == "dcp":
        for found in ranks(2)(go_on, str(tmp_path / "saved" / "x.pt"), 3):
            assert found == pytest.approx(expected, rel=1e-6)


def load_weights(path: str) -> torch.Tensor:
    engine = ZeroEngine(build(seed=1), load_config(stage=3, units={"min_numel": 0}), weights=path)
    return engine.full_state_dict()["head.weight"]


def test_tied_tensors_that_are_stored_under_any_of_their_names(tmp_path: Path) -> None:
    whole = {name: tensor.clone() for name, tensor in build().state_dict().items()}
    others = {name: tensor for name, tensor in whole.items() if name not in ("embed.weight", "head.weight")}
    for names in (["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]):
        save_file(others | {name: whole[name] for name in names}, tmp_path / "model.safetensors")
        assert torch.equal(load_weights(str(tmp_path)), whole["head.weight"])
    save_file({**whole, "head.weight": whole["head.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"the model ties 'embed.weight' and 'head.weight', which differ"):
        load_weights(str(tmp_path))
    save_file(others, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \(1\): embed.weight"):
        load_weights(str(tmp_path))
