"""Saving and loading through the Trainer: directories, whole files, callbacks, hooks."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from safetensors.torch import load_file

import zero_strategy
from tests.integrations.lightning.test_fabric import fabric
from tests.integrations.lightning.trainers import Module, error, loader, raises, train, trainer, weights, zero
from tests.launcher import Launcher

CLOSE = 2e-6


@functools.cache
def plain(epochs: int, **flags: Any) -> dict[str, torch.Tensor]:
    """Weights that one process trains; the same for several tests on a rank."""
    return train(Module(), None, max_epochs=epochs, **flags)


# ---- save, resume ----


def save_and_resume(tmp: str, saved: Any, resumed: Any) -> dict[str, Any]:
    path = os.path.join(tmp, "run.ckpt")
    first = Module()
    run = trainer(zero(saved) if isinstance(saved, int) else saved, max_epochs=1, accumulate_grad_batches=2)
    run.fit(first, loader())
    run.save_checkpoint(path)
    at_once = Module()
    loaded = trainer(zero(resumed) if isinstance(resumed, int) else resumed, max_epochs=1)
    loaded.validate(at_once, loader(8), ckpt_path=path, verbose=False)
    second = Module()
    again = trainer(zero(resumed) if isinstance(resumed, int) else resumed, max_epochs=2, accumulate_grad_batches=2)
    again.fit(second, loader(), ckpt_path=path)
    return {
        "at once": error(weights(at_once), weights(first)),
        "trained": error(weights(second), plain(2, accumulate_grad_batches=2)),
        "lr": again.optimizers[0].param_groups[0]["lr"],
        "step": again.global_step,
        "is directory": os.path.isdir(path),
    }


@pytest.mark.parametrize(
    ("saved", "resumed"), [(3, 3), (3, 1), (1, 2), (0, 3), ("ddp", 3), ("ddp", 1)], ids=lambda value: str(value)
)
def test_fit_goes_on_from_a_checkpoint(ranks: Launcher, tmp_path: Path, saved: Any, resumed: Any) -> None:
    """Also from one that plain DDP saved as a file."""
    for found in ranks(2)(save_and_resume, str(tmp_path), saved, resumed):
        assert found["at once"] == 0
        assert found["trained"] < CLOSE
        assert found["lr"] == pytest.approx(1e-2 / (1 + 0.1 * 4))
        assert found["step"] == 4
        assert found["is directory"] == (saved != "ddp")


def bf16_master_weights(tmp: str) -> float:
    """Resuming must continue from fp32 master weights, not from their bf16 roundings."""
    path = os.path.join(tmp, "run.ckpt")
    whole = Module()
    trainer(zero(3), max_epochs=2, precision="bf16-true").fit(whole, loader())
    first, second = Module(), Module()
    run = trainer(zero(3), max_epochs=1, precision="bf16-true")
    run.fit(first, loader())
    run.save_checkpoint(path)
    trainer(zero(2), max_epochs=2, precision="bf16-true").fit(second, loader(), ckpt_path=path)
    return error(weights(second), weights(whole))


def test_bf16_goes_on_bit_by_bit(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2)(bf16_master_weights, str(tmp_path)) == [0, 0]


def other_world(tmp: str) -> float:
    path = os.path.join(tmp, "two.ckpt")
    if dist.get_world_size() == 2:
        run = trainer(zero(3))
        run.fit(Module(), loader())
        run.save_checkpoint(path)
        return 0.0
    module = Module()
    run = trainer(zero(2), max_epochs=2)
    run.fit(module, loader(batch=8), ckpt_path=path)
    return error(weights(module), plain_of_two())


def plain_of_two() -> dict[str, torch.Tensor]:
    module = Module()
    trainer("auto", devices=1, max_epochs=2).fit(module, loader(batch=8, split=False))
    return weights(module)


def test_another_number_of_ranks_goes_on(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(other_world, str(tmp_path))
    assert max(ranks(1)(other_world, str(tmp_path))) < CLOSE


# ---- what is in it ----


def contents(tmp: str) -> dict[str, Any]:
    path = Path(tmp) / "run.ckpt"
    module = Module()
    run = trainer("zero3")
    run.fit(module, loader())
    run.save_checkpoint(path)
    run.save_checkpoint(Path(tmp) / "weights.ckpt", weights_only=True)
    return weights(module)


def test_the_directory_opens_without_us(ranks: Launcher, tmp_path: Path) -> None:
    trained, _ = ranks(2)(contents, str(tmp_path))
    path = tmp_path / "run.ckpt"
    assert error(load_file(path / "model.safetensors"), trained) == 0
    assert {"exp_avg.safetensors", "exp_avg_sq.safetensors"} <= {file.name for file in (path / "optimizer").iterdir()}
    rest = torch.load(path / "lightning.pt", weights_only=True)
    assert rest["global_step"] == 4 and {"loops", "callbacks", "lr_schedulers", "hyper_parameters"} <= set(rest)
    assert "state_dict" not in rest and "optimizer_states" not in rest

    light = torch.load(tmp_path / "weights.ckpt" / "lightning.pt", weights_only=True)
    assert not {"callbacks", "lr_schedulers", "optimizer_states"} & set(light)
    assert not (tmp_path / "weights.ckpt" / "optimizer").exists()

    # A module without a Trainer, with the hyper-parameters it was saved with.
    for name in ("run.ckpt", "weights.ckpt"):
        loaded = zero_strategy.load_from_checkpoint(Module, tmp_path / name, momentum=0.5)
        assert error(weights(loaded), trained) == 0
        assert loaded.hparams["lr"] == 1e-2 and loaded.hparams["momentum"] == 0.5
    with zero_strategy.open_checkpoint(path, optimizers=True) as file:
        whole = torch.load(file, weights_only=True)
    assert error(whole["state_dict"], trained) == 0
    optimizer = loaded.configure_optimizers()["optimizer"]
    optimizer.load_state_dict(whole["optimizer_states"][0])


def resume_weights_only(tmp: str) -> None:
    contents(tmp)
    with raises(KeyError, "contains only the model"):
        trainer("zero3", max_epochs=2).fit(Module(), loader(), ckpt_path=f"{tmp}/weights.ckpt")


def test_fit_does_not_go_on_from_weights_only(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(resume_weights_only, str(tmp_path))


# ---- objects that are not plain data ----


class Odd:
    """Something that only pickle can hold."""


class WithObject(Module):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["odd"] = Odd()


def objects(tmp: str) -> None:
    run = trainer("zero3")
    run.fit(WithObject(), loader())
    run.save_checkpoint(f"{tmp}/odd.ckpt")
    with raises(Exception, "lightning.pt", "load_weights_only=False"):
        trainer(zero(3)).test(WithObject(), loader(8), ckpt_path=f"{tmp}/odd.ckpt", verbose=False)
    allowing = trainer(zero(3, load_weights_only=False), max_epochs=2)
    allowing.fit(WithObject(), loader(), ckpt_path=f"{tmp}/odd.ckpt")


def test_pickled_objects_need_consent(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(objects, str(tmp_path))


# ---- hooks that change the dict ----


class Edits(Module):
    """Leaves a part of the weights out when saving, and changes the rest when loading."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in [name for name in checkpoint["state_dict"] if name.startswith("net.out")]:
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["scale"] = torch.tensor(7.0)
        checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.25


def edited(tmp: str) -> dict[str, Any]:
    run = trainer("zero3")
    trained = Module()
    run.fit(trained, loader())
    run.save_checkpoint(f"{tmp}/whole.ckpt")
    writer = Edits()
    run = trainer("zero3")
    run.fit(writer, loader())
    run.save_checkpoint(f"{tmp}/part.ckpt")
    reader = Edits()
    again = trainer("zero2", max_epochs=1)
    again.fit(reader, loader(), ckpt_path=f"{tmp}/whole.ckpt")
    return {
        "scale": float(weights(reader)["scale"]),
        "rest": error({**weights(reader), "scale": weights(trained)["scale"]}, weights(trained)),
        "lr": again.optimizers[0].param_groups[0]["lr"],
        "part": sorted(torch.load(f"{tmp}/part.ckpt", weights_only=True)["state_dict"]),
    }


def test_hooks_may_change_what_is_saved_and_loaded(ranks: Launcher, tmp_path: Path) -> None:
    for found in ranks(2)(edited, str(tmp_path)):
        assert found["scale"] == 7.0 and found["rest"] == 0 and found["lr"] == 0.25
        assert "net.inner.weight" in found["part"] and "net.out.weight" not in found["part"]


# ---- whole files ----


def with_io(tmp: str) -> float:
    module = Module()
    run = trainer("zero3", plugins=[TorchCheckpointIO()])
    run.fit(module, loader())
    run.save_checkpoint(f"{tmp}/file.ckpt")
    assert os.path.isfile(f"{tmp}/file.ckpt")
    found = Module.load_from_checkpoint(f"{tmp}/file.ckpt")
    resumed = Module()
    trainer(zero(3), max_epochs=2).fit(resumed, loader(), ckpt_path=f"{tmp}/file.ckpt")
    assert error(weights(resumed), plain(2)) < CLOSE
    with raises(ValueError, "storage_options"):
        second = trainer("zero3")
        second.fit(Module(), loader())
        second.save_checkpoint(f"{tmp}/x.ckpt", storage_options={"a": 1})
    with raises(ValueError, "nowhere://bucket/x.ckpt", "rotocol not known"):
        second.save_checkpoint("nowhere://bucket/x.ckpt")
    return error(weights(found), weights(module))


def test_a_checkpoint_io_plugin_writes_whole_files(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2)(with_io, str(tmp_path)) == [0, 0]


class PathsOnly(TorchCheckpointIO):
    """A plugin as users write them: it does with a path what a `Path` can."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.calls.append(f"save {path.parent.name}/{path.name} {storage_options}")
        super().save_checkpoint(checkpoint, path.with_suffix(".pt"))

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        self.calls.append(f"load {path.name}")
        return super().load_checkpoint(path.with_suffix(".pt"), *args, **options)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(f"remove {path.name}")
        path.with_suffix(".pt").unlink()


def with_paths(tmp: str, strategy: Any) -> list[str]:
    io, folder = PathsOnly(), Path(tmp)
    run = trainer(strategy, plugins=[io])
    run.fit(Module(), loader())
    run.save_checkpoint(folder / "run.ckpt", storage_options={"a": 1})
    again = trainer(strategy, plugins=[io], max_epochs=2)
    again.fit(Module(), loader(), ckpt_path=folder / "run.ckpt")
    run.strategy.remove_checkpoint(folder / "run.ckpt")
    dist.barrier()
    assert not os.listdir(tmp)
    other = fabric(strategy, plugins=[io])
    other.save(folder / "fabric.ckpt", {"model": other.setup(torch.nn.Linear(2, 2)), "step": 1})
    other.barrier()
    assert os.listdir(tmp) == ["fabric.pt"]
    return io.calls


def test_a_checkpoint_io_plugin_is_given_the_path_as_it_is(ranks: Launcher, tmp_path: Path) -> None:
    (tmp_path / "zero").mkdir()
    (tmp_path / "ddp").mkdir()
    first, second = ranks(2)(with_paths, str(tmp_path / "zero"), "zero3")
    expected, others = ranks(2)(with_paths, str(tmp_path / "ddp"), "ddp")
    assert first == [call.replace("ddp/", "zero/") for call in expected] and second == others
    assert first[0] == "save zero/run.ckpt {'a': 1}" and second == ["load run.ckpt"]


class PlainSGD(Module):
    """SGD without momentum, which keeps no state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class TwoSGD(PlainSGD):
    """The same with one more optimizer."""

    def configure_optimizers(self) -> Any:
        first, *rest = self.parameters()
        return [torch.optim.SGD([first], lr=0.05), torch.optim.SGD(rest, lr=0.05)]


def stateless(tmp: str) -> list[float]:
    found = []
    for stage in (1, 2, 3):
        kept = ModelCheckpoint(f"{tmp}/{stage}", "{epoch}", save_top_k=-1)
        chosen = {"plugins": [AsyncCheckpointIO()], "enable_checkpointing": True, "callbacks": [kept], "max_epochs": 2}
        module, resumed, path = PlainSGD(), PlainSGD(), f"{tmp}/{stage}/epoch=0.ckpt"
        trainer(zero(stage), **chosen).fit(module, loader())
        io = {"plugins": [TorchCheckpointIO()], "max_epochs": 2}
        trainer(zero(stage), **io).fit(resumed, loader(), ckpt_path=path)
        found.append(error(weights(resumed), weights(module)))
        two = TwoSGD()
        two.automatic_optimization = False
        with raises(ValueError, "the state of 1 optimizer(s), and this run has 2 (SGD, SGD)"):
            trainer(zero(stage), **io).fit(two, loader(), ckpt_path=path)
    return found


def test_optimizers_without_state_in_whole_files(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2)(stateless, str(tmp_path)) == [[0, 0, 0]] * 2


# ---- callbacks ----


def keep_best(tmp: str) -> dict[str, Any]:
    best = ModelCheckpoint(f"{tmp}/best", "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    every = ModelCheckpoint(f"{tmp}/every", "{step}", every_n_train_steps=3, save_top_k=-1)
    linked = ModelCheckpoint(f"{tmp}/linked", "{epoch}", save_last="link")
    run = trainer(zero(3), max_epochs=4, enable_checkpointing=True, callbacks=[best, every, linked])
    module = Module()
    run.fit(module, loader(), loader(8, seed=3))
    tested = run.test(module, loader(8, seed=3), ckpt_path="best", verbose=False)
    resumed, expected = Module(), plain(5)
    for source in (f"{tmp}/best/last.ckpt", f"{tmp}/linked/last.ckpt"):
        resumed = Module()
        again = trainer(zero(2), max_epochs=5)
        again.fit(resumed, loader(), ckpt_path=source)
        assert error(weights(resumed), expected) < CLOSE
    return {
        "best": sorted(os.listdir(f"{tmp}/best")),
        "every": sorted(os.listdir(f"{tmp}/every")),
        "is link": os.path.islink(f"{tmp}/linked/last.ckpt"),
        "score": float(best.best_model_score),  # type: ignore[arg-type]
        "tested": tested[0]["test_loss"],
    }


def test_model_checkpoint_keeps_best_last_every_n_and_links(ranks: Launcher, tmp_path: Path) -> None:
    found, _ = ranks(2)(keep_best, str(tmp_path))
    directories = [name for name in found["best"] if name != "latest"]
    assert "last.ckpt" in directories and len(directories) == 3
    assert [name for name in found["every"] if name != "latest"] == [f"step={step}.ckpt" for step in (12, 15, 3, 6, 9)]
    assert found["is link"]
    assert found["tested"] == pytest.approx(found["score"], rel=1e-6)


def find_lr(tmp: str) -> tuple[float, list[str]]:
    def finder() -> LearningRateFinder:
        return LearningRateFinder(num_training_steps=30, min_lr=1e-4, max_lr=1e-1)

    expected, module = Module(), Module()
    flags: dict[str, Any] = {"max_epochs": 10, "default_root_dir": tmp}
    # Not one process: the finder looks at the loss of rank 0 alone.
    trainer("ddp", callbacks=[finder()], **flags).fit(expected, loader())
    train(module, 3, callbacks=[finder()], **flags)
    assert module.lr == expected.lr != 1e-2
    return error(weights(module), weights(expected)), os.listdir(tmp)


def test_learning_rate_finder_restores_into_the_live_engine(ranks: Launcher, tmp_path: Path) -> None:
    for found, left in ranks(2)(find_lr, str(tmp_path)):
        assert found < 1e-5  # at the learning rate that it chose
        assert not [name for name in left if name.endswith(".ckpt") or name == "latest"]


def save_alone(tmp: str) -> None:
    run = trainer(zero(1, barrier_seconds=1.0))
    run.fit(Module(), loader())
    if run.is_global_zero:
        with raises(RuntimeError, "Trainer.save_checkpoint()", "rank(s) [1] did not come"):
            run.save_checkpoint(f"{tmp}/alone.ckpt")


def test_saving_on_one_rank_is_an_error_and_no_hang(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(save_alone, str(tmp_path))
    assert not (tmp_path / "alone.ckpt").exists()


def after_fit() -> float:
    module = Module()
    run = trainer("zero3")
    run.fit(module, loader())
    state = run.strategy.lightning_module_state_dict()
    return error(dict(state), weights(module))


def test_state_dict_after_fit(ranks: Launcher) -> None:
    assert ranks(2)(after_fit) == [0, 0]


class Counting(torch.nn.Module):
    """Saves what is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class CountsSteps(Module):
    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counting.count += 1


def extra(tmp: str) -> list[int]:
    run = trainer("zero3")
    run.fit(CountsSteps(), loader())
    run.save_checkpoint(f"{tmp}/extra.ckpt")
    loaded = CountsSteps()
    trainer("zero1").test(loaded, loader(8), ckpt_path=f"{tmp}/extra.ckpt", verbose=False)
    plain = zero_strategy.load_from_checkpoint(CountsSteps, f"{tmp}/extra.ckpt")
    return [loaded.counting.count, plain.counting.count]


def test_lightning_checkpoint_extra_state_of_modules(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2)(extra, str(tmp_path)) == [[4, 4], [4, 4]]


class Wider(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net.out = torch.nn.Linear(16, 2)
        self.more = torch.nn.Linear(2, 2)


def other_model(tmp: str) -> None:
    contents(tmp)
    with raises(ValueError, "more.weight", "net.out.weight"):
        trainer("zero3").test(Wider(), loader(8), ckpt_path=f"{tmp}/run.ckpt", verbose=False)
    with raises(Exception, "nothing.ckpt"):
        trainer("zero3").test(Module(), loader(8), ckpt_path=f"{tmp}/nothing.ckpt", verbose=False)


def test_a_checkpoint_of_another_model_is_refused_by_name(ranks: Launcher, tmp_path: Path) -> None:
    ranks(2)(other_model, str(tmp_path))
