"""Trainer.fit at every stage against plain Lightning in one process, or against DDP where ranks matter."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, GradientAccumulationScheduler, ModelSummary
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import zero_strategy
from tests.integrations.lightning.trainers import (
    Module,
    Net,
    data,
    error,
    loader,
    train,
    trainer,
    weights,
    zero,
)
from tests.launcher import Launcher
from zero_strategy.fsdp.init import Init

STAGES = (0, 1, 2, 3)
CLOSE = 2e-6
"""A whole batch and its halves differ by rounding."""


class ClipsItself(Module):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class Manual(Module):
    """Two micro-batches per step, counted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, pl.core.optimizer.LightningOptimizer)
        stepping = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=stepping):
            self.manual_backward(self.loss(batch) / 2)
            if stepping:
                self.clip_gradients(optimizer, 0.05, "norm")
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()  # type: ignore[union-attr, call-arg]


class Alternating(Module):
    """SGD and Adam over the same parameters, in turn; Adam also over its gradient once more."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        chosen: Any = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        with chosen.toggle_model():
            self.manual_backward(self.loss(batch))
            chosen.step()
        if batch_idx % 4 == 3:
            self.optimizers()[0].step()  # type: ignore[index, union-attr]
        chosen.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9), torch.optim.Adam(self.parameters(), lr=0.01)]


class Gan(pl.LightningModule):
    """Two optimizers in turn; the second forward of a batch must see what the first step did."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.generator = Net()
            self.judge = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
        self.log_scale = nn.Parameter(torch.zeros(()))

    def fake(self, x: Tensor) -> Tensor:
        made: Tensor = self.generator(x) * self.log_scale.exp()
        return made

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer, is_judge in zip(self.optimizers(), (False, True), strict=True):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            if is_judge:
                with torch.no_grad():
                    fake = self.fake(x)
                loss = (F.softplus(self.judge(fake)) + F.softplus(-self.judge(y[:, None]))).mean()
            else:
                loss = F.softplus(-self.judge(self.fake(x))).mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        made = [*self.generator.parameters(), self.log_scale]
        return torch.optim.Adam(made, lr=1e-2), torch.optim.Adam(self.judge.parameters(), lr=1e-2)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer, lr=1e-3)


class Finetuned(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=1e-2)


class Configured(Module):
    """Builds its model where a strategy may shard it as it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.start = self.net.state_dict()
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net()
            self.net.load_state_dict(self.start)


class ConfiguredInSlices(Configured):
    def configure_model(self) -> None:
        with Init():
            super().configure_model()


class Unlogged(Module):
    """torch.compile cannot trace Lightning's `log`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class SeveralSteps(Module):
    """Uses each hook that sees gradients."""

    def on_after_backward(self) -> None:
        assert all(p.grad is not None for p in self.parameters())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(p.grad is not None for p in self.parameters())


CASES: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any]]] = {
    "plain": (Module, {}),
    "accumulation": (Module, {"accumulate_grad_batches": 3}),
    "clip_by_norm": (Module, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}),
    "clip_by_value": (Module, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "configure_gradient_clipping": (ClipsItself, {}),
    "manual_optimization": (Manual, {}),
    "two_optimizers": (Gan, {}),
    "two_optimizers_of_one_parameter": (Alternating, {}),
    "configure_model": (Configured, {}),
    "configure_model_under_init": (ConfiguredInSlices, {}),
    "gradient_hooks": (SeveralSteps, {}),
    "double_precision": (Module, {"precision": "64-true"}),
}


AT_STAGES = {
    "clip_by_value": (1, 3),
    "configure_gradient_clipping": (0, 2),
    "manual_optimization": (1, 3),
    "two_optimizers_of_one_parameter": (2, 3),
    "configure_model": (0, 3),
    "configure_model_under_init": (1, 3),
    "gradient_hooks": (2, 3),
    "double_precision": (0, 3),
}
"""Cases that are not at every stage: each differs from one that is by what happens in the rank itself."""


def errors(name: str, epochs: int = 2) -> dict[int, float]:
    build, flags = CASES[name]
    expected = train(build(), None, max_epochs=epochs, **flags)
    return {
        stage: error(train(build(), stage, max_epochs=epochs, **flags), expected)
        for stage in AT_STAGES.get(name, STAGES)
    }


@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_plain_process(ranks: Launcher, name: str) -> None:
    for found in ranks(2)(errors, name):
        assert max(found.values()) < CLOSE, found


def callback_errors() -> dict[str, float]:
    found = {}
    for build, make in (
        (Finetuned, Unfreeze),
        (Module, lambda: GradientAccumulationScheduler(scheduling={0: 1, 1: 4})),
    ):
        expected = train(build(), None, max_epochs=3, callbacks=[make()])
        for stage in STAGES:
            name = f"{type(make()).__name__} at stage {stage}"
            found[name] = error(train(build(), stage, max_epochs=3, callbacks=[make()]), expected)
    return found


def test_finetuning_and_changing_accumulation(ranks: Launcher) -> None:
    """Parameters that are unfrozen and added to the optimizer between epochs."""
    for found in ranks(2)(callback_errors):
        assert max(found.values()) < CLOSE, found


def compile_errors() -> list[float]:
    expected = train(Unlogged(), None)
    found = []
    for stage in STAGES:
        module = Unlogged()
        trainer(zero(stage)).fit(torch.compile(module, backend="eager"), loader())  # type: ignore[arg-type]
        found.append(error(weights(module), expected))
    return found


def test_a_compiled_module(ranks: Launcher) -> None:
    for found in ranks(2, timeout=120)(compile_errors):
        assert max(found) < CLOSE, found


def low_precision(precision: str) -> dict[str, float]:
    """Distances from fp32, and what the parameters and master weights are."""
    exact = train(Module(), None)
    plain = Module()
    trainer("ddp", precision=precision).fit(plain, loader())
    module = Module()
    run = trainer(zero(3), precision=precision)
    run.fit(module, loader())
    (bucket, *_) = run.strategy.engine.model.buckets
    dtype = {"bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}[precision]
    assert {p.dtype for p in module.parameters()} == {dtype} and module.dtype == dtype
    assert bucket.has_master == (precision == "bf16-true")
    assert type(run.precision_plugin).__name__ == "ZeroPrecision"
    return {"zero": error(weights(module), exact), "ddp": error(weights(plain), exact)}


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_bf16_is_no_further_from_fp32_than_ddp_is(ranks: Launcher, precision: str) -> None:
    for found in ranks(2)(low_precision, precision):
        assert 0 < found["zero"] <= 1.5 * found["ddp"], found


class Overflowing(Module):
    """The loss of one rank is not finite in one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss


def fp16(precision: str, stage: int) -> dict[str, Any]:
    from zero_strategy.integrations.lightning import ZeroPrecision

    module = Overflowing()
    strategy = zero(stage, loss_scale={"initial": 1024.0}, precision_plugin=ZeroPrecision(precision))
    run = trainer(strategy)
    run.fit(module, loader())
    found = weights(module)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    return {"weights": found, "scale": run.precision_plugin.state_dict()}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
def test_fp16_ranks_skip_a_step_together(ranks: Launcher, precision: str, stage: int) -> None:
    first, second = ranks(2)(fp16, precision, stage)
    assert error(first["weights"], second["weights"]) == 0
    assert first["scale"] == second["scale"]
    assert first["scale"]["skipped"] == 1 and first["scale"]["scale"] == 512.0


class Watching(Module):
    """Remembers which samples this rank saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.sampler: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch[0][:, 0].tolist()
        self.sampler = self.trainer.train_dataloader.sampler  # type: ignore[union-attr]
        self.log("rank", float(self.global_rank), sync_dist=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def sampled() -> tuple[list[float], bool, float]:
    module = Watching()
    run = trainer("zero3", use_distributed_sampler=True)
    run.fit(module, DataLoader(data(16), 2))
    return module.seen, isinstance(module.sampler, DistributedSampler), float(run.callback_metrics["rank"])


def test_ranks_get_samples_of_their_own_and_log_means(ranks: Launcher) -> None:
    (first, is_distributed, mean), (second, *_) = ranks(2)(sampled)
    assert is_distributed
    assert sorted(first + second) == sorted(data(16).tensors[0][:, 0].tolist())
    assert mean == 0.5


def stopped() -> int:
    class Rank(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            # Improves on rank 0 only; the mean gets worse from epoch 2 on.
            self.log("watched", float(self.current_epoch > 1) * 4 - self.global_rank, sync_dist=True)

    module = Rank()
    run = trainer("zero3", max_epochs=10, callbacks=[EarlyStopping("watched", patience=1)])
    run.fit(module, loader(), loader(8))
    return run.current_epoch


def test_early_stopping_ends_all_ranks_together(ranks: Launcher) -> None:
    first, second = ranks(2)(stopped)
    assert first == second and first < 10


class Initialised(Module):
    """`scale` belongs to the module itself, which must know how to initialise it."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@pytest.mark.parametrize("stage", [1, 3])
def test_init_module_without_memory(ranks: Launcher, stage: int) -> None:
    assert ranks(2)(built_from_meta, stage) == [4, 4]


def built_from_meta(stage: int) -> int:
    run = trainer(zero(stage))
    with run.init_module(empty_init=True):
        module = Initialised()
    assert {p.device.type for p in module.parameters()} == {"meta"}
    run.fit(module, loader())
    assert all(bool(tensor.isfinite().all()) for tensor in weights(module).values())
    return run.global_step


def again() -> list[float]:
    """fit, fit on with a new Trainer, and the same under one plain process."""
    expected, module = Module(), Module()
    found = []
    for epochs in (1, 2):
        train(expected, None, max_epochs=epochs)
        train(module, 3, max_epochs=epochs)
        found.append(error(weights(module), weights(expected)))
    return found


def test_a_second_fit_of_the_same_module(ranks: Launcher) -> None:
    for found in ranks(2)(again):
        assert max(found) < CLOSE, found


def explained() -> str:
    summary = ModelSummary()
    flags = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5, "max_steps": 3, "callbacks": [summary]}
    module = Module()
    run = trainer(zero(3), **flags)
    run.fit(module, loader())
    total = summary._summary(run, module).total_parameters
    assert total == sum(p.numel() for p in Module().parameters())
    text: str = run.strategy.explain()
    return text


def test_the_summary_is_whole_and_explain_names_what_the_trainer_owns(ranks: Launcher) -> None:
    text = ranks(2)(explained)[0]
    for row in (
        "Trainer(accumulate_grad_batches=4)",
        "Trainer(gradient_clip_val=0.5)",
        "Trainer(precision='32-true')",
        "Trainer(devices=2, num_nodes=1)",
        "Trainer(max_steps=3)",
        "derived: 2 ranks x 4 x 4",
    ):
        assert row in text


def copies_of_a_trainer(stage: int) -> dict[str, Any]:
    """`torch.save`, pickle and deepcopy of a Trainer after a fit, and a fit by the copy."""
    run, module = trainer(zero(stage), max_epochs=1), Module()
    run.fit(module, loader())
    found: dict[str, Any] = {}
    buffer = io.BytesIO()
    if stage == 3:
        for make in (lambda: torch.save(run, buffer), lambda: pickle.dumps(run), lambda: copy.deepcopy(run)):
            with pytest.raises(RuntimeError, match="full_state_dict"):
                make()
        return found
    torch.save(run, buffer)
    buffer.seek(0)
    copies = {
        "save": torch.load(buffer, weights_only=False),
        "pickle": pickle.loads(pickle.dumps(run)),
        "deepcopy": copy.deepcopy(run),
    }
    expected = trainer(zero(stage), max_epochs=1)
    ours = Module()
    ours.load_state_dict(weights(module))
    expected.fit(ours, loader())
    for name, copied in copies.items():
        own = copied.lightning_module
        found[f"{name} state"] = error(weights(own), weights(module))
        assert copied.global_step == run.global_step and copied.strategy.engine is None
        copied.fit_loop.max_epochs = 2
        copied.fit(own, loader())
        found[name] = error(weights(own), weights(ours))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_copies_of_a_trainer(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(copies_of_a_trainer, stage):
        assert len(found) == (0 if stage == 3 else 6) and max(found.values(), default=0.0) < CLOSE, found


def by_ddp_afterwards(stage: int) -> tuple[str, float]:
    """The error of another strategy, and how far a training is that does what it says from one of a module like it."""
    module = Module()
    run = trainer(zero(stage), max_epochs=1)
    run.fit(module, loader())
    with pytest.raises(RuntimeError, match=r"engine\.close\(gather=True\) makes it a plain module again") as caught:
        trainer("ddp", max_epochs=1).fit(module, loader())
    other = Module()
    other.load_state_dict(run.strategy.engine.full_state_dict())  # type: ignore[attr-defined]
    zero_strategy.engine_of(module).close(gather=True)
    for each in (module, other):
        trainer("ddp", max_epochs=1).fit(each, loader())
    return str(caught.value), max_gap(module.state_dict(), other.state_dict())


def max_gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_another_strategy_for_the_same_module_is_told(ranks: Launcher, stage: int) -> None:
    for text, gap in ranks(2)(by_ddp_afterwards, stage):
        told = "wrapping its module" if stage == 3 else "is sharded by ZeroStrategy, so DDPStrategy cannot train it"
        assert told in text and gap == 0.0


def other_settings(stage: int) -> list[Any]:
    """Trainers of other stages and precisions go on with one module, each with an engine of its own."""
    module, found = Module(), list[Any]()
    for strategy in (zero(stage), zero(stage), zero(stage, prefetch=3), zero(1)):
        run = trainer(strategy)
        run.fit(module, loader())
        found.append(strategy.engine)
    kept, renewed, last = found[0] is found[1], found[1].ended and found[2].ended, zero_strategy.engine_of(module)
    return [kept, renewed, last is found[3] and last.stage == 1, found[1].ended_by]


@pytest.mark.parametrize("stage", [2, 3])
def test_trainers_with_other_settings_take_a_module_over(ranks: Launcher, stage: int) -> None:
    for kept, renewed, last, ended_by in ranks(2)(other_settings, stage):
        assert kept and renewed and last
        assert "with other settings (prefetch was" in ended_by


class SearchesALine(Module):
    """LBFGS, whose step evaluates training_step and its backward several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def loss(self, batch: Any) -> torch.Tensor:
        """In float64, for searches amplify rounding."""
        x, y = batch
        return ((self.net(x) * self.scale).squeeze(-1) - y).square().mean()


def with_lbfgs(stage: int) -> None:
    plain, found = (train(SearchesALine().double(), which, precision="64-true") for which in (None, stage))
    for name, value in plain.items():
        assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-8), name


@pytest.mark.parametrize("stage", [0, 3])
def test_lbfgs_in_automatic_optimization(ranks: Launcher, stage: int) -> None:
    ranks(2)(with_lbfgs, stage)
