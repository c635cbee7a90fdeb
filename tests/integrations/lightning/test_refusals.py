"""Settings that cannot work are refused on all ranks, by name and with a way out."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

from tests.integrations.lightning.trainers import Module, error, loader, raises, train, trainer, weights, zero
from tests.launcher import Launcher
from zero_strategy import ZeroStrategy
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.integrations.lightning import module_engine
from zero_strategy.integrations.lightning.setup import check_device
from zero_strategy.integrations.takeover import engines_over


class Optimizing(Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        own = list(self.parameters())
        if self.kind == "foreign":
            return torch.optim.Adam(copy.deepcopy(own))
        if self.kind == "missing":
            return torch.optim.Adam(own[:-1])
        return torch.optim.Adafactor(own)


def optimizers() -> None:
    for kind, exception, parts in (
        ("foreign", ValueError, ["Adam", "not a parameter of the sharded module"]),
        ("missing", ValueError, ["net.out.bias", "no optimizer", "requires_grad_"]),
        ("whole", TypeError, ["Adafactor", "stage 0"]),
    ):
        with raises(exception, *parts):
            trainer("zero2").fit(Optimizing(kind), loader())


def test_optimizers_that_do_not_fit_the_module(ranks: Launcher) -> None:
    ranks(2)(optimizers)


class OwnPrecision(MixedPrecision):
    """Somebody's own."""


def plugins() -> None:
    with raises(TypeError, "OwnPrecision", "bf16-mixed"):
        trainer("zero3", plugins=[OwnPrecision("bf16-mixed", "cpu")])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with raises(ValueError, "MixedPrecision", "loss_scale"):
        trainer("zero3", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    disabled = torch.amp.GradScaler("cpu", enabled=False)  # as torch makes one for CUDA where there is none
    assert trainer("zero3", plugins=[MixedPrecision("16-mixed", "cpu", disabled)]).precision == "16-mixed"
    with raises(ValueError, "devices=4", "world size (2)"):
        trainer("zero3", devices=4).fit(Module(), loader())


def test_plugins_and_numbers_of_devices(ranks: Launcher) -> None:
    ranks(2)(plugins)


class FitsInside(Callback):
    """Another Trainer with other settings takes the module in the midst of a training."""

    def on_train_batch_end(self, outer: Any, pl_module: Any, *_: Any) -> None:
        if outer.global_step == 2:
            with raises(RuntimeError, "a run of a Trainer is working with the engine"):
                trainer(zero(1)).fit(pl_module, loader())
            pl_module.trainer = outer


def resharding() -> None:
    module = Module()
    trainer(zero(3), callbacks=[FitsInside()]).fit(module, loader())
    second = copy.deepcopy(Module())
    trainer(zero(1)).fit(second, loader())
    assert error(weights(second), weights(module)) < 2e-6


def test_a_module_in_a_fit_is_not_sharded_by_another(ranks: Launcher) -> None:
    ranks(2)(resharding)


def test_devices_without_collectives() -> None:
    for name in ("mps", "xla"):
        with pytest.raises(ValueError, match=f"{name}.*accelerator"):
            check_device(torch.device(name), "Trainer")


def test_lightning_settings() -> None:
    from datetime import timedelta

    with pytest.raises(ValueError, match="Trainer"):
        ZeroStrategy(precision="bf16-mixed")
    with pytest.raises(ValueError, match="stage is 4"):
        ZeroStrategy(stage=4)
    with pytest.raises(ValueError, match=r"stag.*stage"):
        ZeroStrategy({"stag": 3})
    with pytest.raises(ValueError, match="same thing"):
        ZeroStrategy(timeout=timedelta(seconds=5), timeout_seconds=5.0)
    assert ZeroStrategy(timeout=timedelta(seconds=5)).config.timeout_seconds == 5
    with pytest.raises(TypeError, match=r"timeout is 5 \(int\); expected a timedelta, or timeout_seconds"):
        ZeroStrategy(timeout=5)  # type: ignore[arg-type]


class Penalized(Module):
    """Adds a penalty on all weights to the loss."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.gathers = gathers

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        with GatheredParameters(self.parameters(), enabled=self.gathers):
            return loss + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())


def penalties() -> list[float]:
    expected = train(Penalized(False), None)
    return [error(train(Penalized(gathers), 3), expected) for gathers in (False, True)]


def test_lightning_loss_that_reads_released_parameters(ranks: Launcher) -> None:
    """A `training_step` gathers what it reads, with and without a scope."""
    for found in ranks(2)(penalties):
        assert max(found) < 1e-5


class Scheduling(Module):
    """Steps its schedule as well: rightly, where it optimizes by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()  # type: ignore[union-attr]
        self.lr_schedulers().step()  # type: ignore[union-attr]
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def schedules() -> None:
    trainer("zero1").fit(Scheduling(True), loader())
    with raises(RuntimeError, "both the Trainer and Scheduling.training_step step the StepLR"):
        trainer("zero1").fit(Scheduling(False), loader())


def test_lightning_scheduler_has_one_owner(ranks: Launcher) -> None:
    ranks(2)(schedules)


class Logging(Module):
    """Logs the norm as Lightning's documentation shows it, from `p.grad` by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = grad_norm(self, 2)["grad_2.0_norm_total"]
        self.norms.append((float(norm), self.trainer.strategy.engine.grad_norm().value))
        self.log("norm", norm)


def norms_by_hand() -> list[tuple[float, float]]:
    found = []
    for stage in (1, 2, 3):
        torch.manual_seed(1)
        module = Logging()
        fitted = trainer(zero(stage))
        fitted.fit(module, loader())
        found += module.norms
    return found


def test_a_gradient_norm_by_hand_is_that_of_the_whole_gradient(ranks: Launcher) -> None:
    for norms in ranks(2)(norms_by_hand):
        assert len(norms) > 3
        for by_hand, known in norms:
            assert by_hand == pytest.approx(known, rel=1e-6) and known > 0


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(ValueError, match=r"'?stag'?.*stage"):
        ZeroStrategy(stag=3)
    with pytest.raises(ValueError, match="gradient_clip_val"):
        ZeroStrategy(gradient_clipping=1.0)


def test_a_strategy_of_another_namespace_names_the_right_one() -> None:
    """Lightning refuses it, showing the object; so that says where the other one is."""
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

    from zero_strategy.integrations.fabric import ZeroStrategy as FabricStrategy

    wanted = r"lightning\.ZeroStrategy\(stage=2\), for the Trainer of lightning\.pytorch; .*integrations\.fabric"
    with pytest.raises(ValueError, match=wanted):
        Fabric(accelerator="cpu", devices=1, strategy=ZeroStrategy(stage=2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fabric\.ZeroStrategy\(stage=1\), for Fabric; .* zero_strategy"):
        Trainer(accelerator="cpu", devices=1, strategy=FabricStrategy(stage=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fabric\.clip_gradients"):
        FabricStrategy(gradient_clipping=1.0)  # type: ignore[arg-type]


def test_a_strategy_explains_itself_before_it_has_a_trainer() -> None:
    from zero_strategy.integrations.fabric import ZeroStrategy as FabricStrategy

    for made in (ZeroStrategy(stage=2), FabricStrategy(stage=2)):
        rows = {line.split()[0]: line.split()[1:] for line in made.explain().splitlines()}
        assert rows["stage"] == ["2", "user:", "keyword"] and rows["prefetch"] == ["1", "default"]


class Masked(pl.LightningModule):
    """A model that has no tiles."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        self.model = BertForMaskedLM(BertConfig(vocab_size=8, max_position_embeddings=8, **shape))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def set_up_again() -> tuple[bool, int]:
    """Tells whether a module is plain after a set-up that was refused, and steps of the next fit."""
    module, batches = Masked(), DataLoader(torch.randint(0, 8, (4, 4)), 2)
    with raises(ValueError, "BertForMaskedLM is no causal language model"):
        trainer(zero(2, activation_checkpointing={"tile_tokens": 4})).fit(module, batches)
    plain = not engines_over(module)
    run = trainer(zero(2))
    run.fit(module, batches)
    return plain, run.global_step


def test_a_fit_works_after_a_set_up_that_was_refused(ranks: Launcher) -> None:
    assert ranks(2)(set_up_again) == [(True, 2)] * 2


def set_up_fails_on_one() -> tuple[str, bool, int]:
    """Error of a set-up that fails on rank 1, whether the module is plain then, and steps of the next fit."""

    def failing(engine: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("no room for records")
        install_diagnostics(engine)

    module, said = Module(), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_engine, "install_diagnostics", failing)
        try:
            trainer(zero(3)).fit(module, loader())
        except (OSError, RuntimeError) as caught:
            said = str(caught)
    plain = not engines_over(module)
    run = trainer(zero(3))
    run.fit(module, loader())
    return said, plain, run.global_step


def test_a_set_up_that_fails_on_one_rank_gives_the_module_back_on_all(ranks: Launcher) -> None:
    for said, plain, steps in ranks(2)(set_up_fails_on_one):
        assert "no room for records" in said and plain and steps > 0
