"""`zero-strategy checkpoint convert --to lightning`: plain Lightning goes on from what was trained here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.lightning.test_foreign_checkpoints import Counting, Odd
from tests.integrations.lightning.trainers import Module, error, loader, trainer, zero
from tests.launcher import Launcher
from zero_strategy.cli import main
from zero_strategy.convert import lightning as interop
from zero_strategy.convert.portable import loaded
from zero_strategy.engine import ZeroEngine

CLOSE = 2e-6


class Extra(Module):
    """Beside parameters, state of its own and a tied weight."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen = torch.nn.Identity()
        self.same = self.net.out
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def tensors(module: Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items() if name != "_extra_state"}


def fit(strategy: Any, epochs: int, path: str | None = None, save: str | None = None, **flags: Any) -> dict[str, Any]:
    module, callback = Extra(lr=2e-2, momentum=0.7), Counting()
    run = trainer(zero(strategy) if isinstance(strategy, int) else strategy, max_epochs=epochs, **flags)
    run.callbacks.append(callback)
    run.fit(module, loader(), ckpt_path=path)
    if save:
        run.save_checkpoint(save)
    return {
        "weights": tensors(module),
        "lr": [group["lr"] for group in run.optimizers[0].param_groups],
        "steps": (run.global_step, run.current_epoch, callback.seen, module.calls),
    }


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_ddp_goes_on_from_a_converted_checkpoint(ranks: Launcher, tmp_path: Path, precision: str) -> None:
    """Weights, moments, schedule, loops, callbacks; hyper-parameters for `load_from_checkpoint`."""
    flags: dict[str, Any] = {"precision": precision}
    trained = ranks(2)(fit, 3, 1, None, str(tmp_path / "ours.ckpt"), **flags)[0]
    assert (
        main(["checkpoint", "convert", str(tmp_path / "ours.ckpt"), str(tmp_path / "a.ckpt"), "--to", "lightning"]) == 0
    )
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "hyper_parameters"} <= set(content)
    plain = Extra.load_from_checkpoint(tmp_path / "a.ckpt")
    assert plain.hparams["momentum"] == 0.7 and plain.calls == trained["steps"][3]
    assert error(tensors(plain), trained["weights"]) == 0
    assert plain.same.weight is plain.net.out.weight

    resumed = ranks(2)(fit, "ddp", 2, str(tmp_path / "a.ckpt"), **flags)
    expected = ranks(2)(fit, "ddp", 2, **flags)
    for found, whole in zip(resumed, expected, strict=True):
        assert error(found["weights"], whole["weights"]) < (CLOSE if precision == "32-true" else 1e-4)
        assert found["steps"] == whole["steps"] == (8, 2, 8, 8)
        assert found["lr"] == whole["lr"]


def test_what_is_written_reads_back(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(fit, 2, 1, None, str(tmp_path / "ours.ckpt"))
    main(["checkpoint", "convert", str(tmp_path / "ours.ckpt"), str(tmp_path / "a.ckpt"), "--to", "lightning"])
    again = ranks(2)(fit, 1, 2, str(tmp_path / "a.ckpt"))
    straight = ranks(2)(fit, 1, 2, str(tmp_path / "ours.ckpt"))
    for found, expected in zip(again, straight, strict=True):
        assert error(found["weights"], expected["weights"]) == 0 and found["steps"] == expected["steps"]
    state = interop.read(tmp_path / "a.ckpt")
    assert all(torch.equal(loaded(state.weights[name]), loaded(value)) for name, value in state.weights.items())


def test_a_loss_scale_is_where_lightning_looks_for_it(ranks: Launcher, tmp_path: Path) -> None:
    ranks(1)(fit, 2, 1, None, str(tmp_path / "ours"), precision="16-true")
    main(["checkpoint", "convert", str(tmp_path / "ours"), str(tmp_path / "a.ckpt"), "--to", "lightning"])
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(content["MixedPrecision"])
    assert float(scaler.scale(torch.ones(()))) == content["ZeroPrecision"]["scale"]
    assert scaler.state_dict()["_growth_tracker"] == content["ZeroPrecision"]["good_steps"] > 0


def save_engine(folder: str) -> None:
    module = Module()
    engine = ZeroEngine(module, {"stage": 3, "units": {"min_numel": 0}})
    optimizer = module.configure_optimizers()["optimizer"]
    engine.attach(optimizer)
    for batch in loader():
        module.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.save(folder)


def test_a_checkpoint_of_no_trainer(ranks: Launcher, tmp_path: Path) -> None:
    """Weights and optimizer states resume; there are no loops to go on in."""
    ranks(2)(save_engine, str(tmp_path / "ours"))
    main(["checkpoint", "convert", str(tmp_path / "ours"), str(tmp_path / "a.ckpt"), "--to", "lightning"])
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert content["global_step"] == 4 and content["lr_schedulers"] == []
    ((state,),) = (content["optimizer_states"],)
    assert all(values["step"] == 4 for values in state["state"].values()) and len(state["state"]) > 8
    found = ranks(1)(resumed_plainly, str(tmp_path / "a.ckpt"))
    assert found == [8.0]
    assert (
        main(
            [
                "checkpoint",
                "convert",
                str(tmp_path / "ours"),
                str(tmp_path / "w"),
                "--to",
                "lightning",
                "--weights-only",
            ]
        )
        == 0
    )
    assert "optimizer_states" not in torch.load(tmp_path / "w", weights_only=True)


def resumed_plainly(path: str) -> float:
    module = Module()
    run = trainer("auto", devices=1)
    run.fit(module, loader(16), ckpt_path=path)
    return float(run.optimizers[0].state[module.scale]["step"])


def save_odd(path: str) -> None:
    module = Module()
    module.hparams["odd"] = Odd()
    run = trainer(zero(1))
    run.fit(module, loader())
    run.save_checkpoint(path)


def test_to_lightning_hyper_parameters_that_are_not_plain_data(
    ranks: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(1)(save_odd, str(tmp_path / "ours"))
    assert main(["checkpoint", "convert", str(tmp_path / "ours"), str(tmp_path / "a.ckpt"), "--to", "lightning"]) == 2
    said = capsys.readouterr().err
    assert "Odd" in said and "open_checkpoint" in said and not os.path.exists(tmp_path / "a.ckpt")
