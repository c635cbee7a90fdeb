"""A second Trainer over a model that a first one trained, against transformers' own doing the same."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

import zero_strategy
from tests.integrations.accelerate.training import fresh_state
from tests.integrations.huggingface.training import build, difference, history, trainer_of, whole
from tests.launcher import Launcher

CLOSE = 2e-5
FAR = 2e-4
"""Of weights: a fiftieth of one of Adam's steps, which rounding turns where a gradient is all but zero."""


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[key] - b[key]).abs().max()) for key in a)


def quick(stage: int | None, kind: str, folder: Path, model: Any, **arguments: Any) -> Any:
    arguments = {"max_steps": 3, "num_train_epochs": 1, **arguments}
    return trainer_of(stage, kind, folder, make=lambda _: model, **arguments)


def in_turn(stage: int | None, second: int | None, folder: str) -> tuple[list[Any], dict[str, Tensor], str]:
    """Two Trainers train one model, with other stages and batch sizes, and the first one evaluates at the end."""
    with fresh_state():
        model = build("gpt2")
        one = quick(stage, "gpt2", Path(folder) / "one", model)
        one.train()
        two = quick(second, "gpt2", Path(folder) / "two", model, per_device_train_batch_size=3, learning_rate=3e-3)
        two.train()
        found = [*history(one), *history(two), {"loss": one.evaluate()["eval_loss"]}]
        text = ""
        if stage is not None:
            assert zero_strategy.engine_of(one) is zero_strategy.engine_of(two) is zero_strategy.engine_of(model)
            with pytest.raises(RuntimeError, match="AdamW updated the shards of an engine that has ended") as caught:
                one.train()  # its optimizer's state went with the engine
            text = str(caught.value)
            one.optimizer = one.lr_scheduler = None
            one.train()
            one.save_model(f"{folder}/saved")
        return found, whole(two if stage is None else one), text


@pytest.fixture(scope="module")
def plain_in_turn(ranks: Launcher, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The logs of transformers' own Trainers."""
    return ranks(2, timeout=120)(in_turn, None, None, str(tmp_path_factory.mktemp("plain")))[0][0]


@pytest.mark.parametrize(("first", "second"), [(1, 3), (2, 2), (3, 3), (3, 1)])
def test_two_trainers_train_one_model_in_turn(
    ranks: Launcher, tmp_path: Path, first: int, second: int, plain_in_turn: list[Any]
) -> None:
    plain = plain_in_turn
    for ours, _, text in ranks(2, timeout=120)(in_turn, first, second, str(tmp_path / "zero")):
        assert difference(plain, ours) < CLOSE and len(ours) == 9
        assert "another ZeroAccelerator has prepared its module" in text and "trainer.optimizer = None" in text
    assert (tmp_path / "zero" / "saved" / "model.safetensors").is_file()


def resized(stage: int | None, folder: str) -> tuple[list[Any], dict[str, Tensor], str]:
    """The vocabulary grows after a training, once the error's advice is taken, and a second Trainer goes on."""
    with fresh_state():
        model, text = build("llama"), ""
        one = quick(stage, "llama", Path(folder) / "one", model)
        one.train()
        if stage is None:
            del one  # with DistributedDataParallel's hold of what accumulates gradients of the old shape
            gc.collect()
        else:
            with pytest.raises((RuntimeError, ValueError)) as caught:
                model.resize_token_embeddings(60)
            text = str(caught.value)
            zero_strategy.engine_of(one).close(gather=True)
            assert model.get_input_embeddings().weight.shape[0] == 48
        torch.manual_seed(6)
        model.resize_token_embeddings(60)
        two = quick(stage, "llama", Path(folder) / "two", model)
        two.train()
        assert model.get_input_embeddings().weight.shape[0] == 60
        return history(two), whole(two), text


@pytest.mark.parametrize("stage", [1, 3])
def test_a_vocabulary_grows_between_trainings(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    plain, state, _ = ranks(2, timeout=120)(resized, None, str(tmp_path / "plain"))[0]
    for ours, weights, text in ranks(2, timeout=120)(resized, stage, str(tmp_path / "zero")):
        assert difference(plain, ours) < CLOSE and far(state, weights) < FAR
        assert "model.embed_tokens.weight" in text and "close(gather=True)" in text


def gets_a_head(stage: int, folder: str) -> list[str]:
    """A module gets parameters between trainings of one Trainer: it is prepared anew, with a new optimizer."""
    with fresh_state():
        model = build("llama")
        one = quick(stage, "llama", Path(folder), model)
        one.train()
        engine = zero_strategy.engine_of(one)
        model.model.norm.scale = torch.nn.Parameter(torch.ones(32))
        found = engine.strangers()
        with pytest.raises(RuntimeError, match=r"came into the module|trainer\.optimizer = None"):
            one.train()
        one.optimizer = one.lr_scheduler = None
        one.train()
        assert engine.ended and "'model.norm.scale'" in engine.ended_by
        return [*found, *zero_strategy.engine_of(one).strangers()]


def test_a_model_with_new_parameters_is_prepared_anew(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2, timeout=120)(gets_a_head, 2, str(tmp_path)) == [["model.norm.scale"]] * 2


class TrainsInside(TrainerCallback):
    """Another Trainer of the same model in the midst of a training."""

    def __init__(self, stage: int, folder: Path) -> None:
        self.stage, self.folder, self.text = stage, folder, ""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            try:
                quick(self.stage, "gpt2", self.folder, model).train()
            except RuntimeError as error:
                self.text = str(error)


def inside(stage: int, folder: str) -> tuple[str, list[Any]]:
    with fresh_state():
        other = TrainsInside(stage, Path(folder) / "inside")
        trainer = quick(stage, "gpt2", Path(folder) / "one", build("gpt2"))
        trainer.add_callback(other)
        trainer.train()
        return other.text, history(trainer)


def test_a_model_in_training_is_not_taken_away(ranks: Launcher, tmp_path: Path) -> None:
    for text, ours in ranks(2, timeout=120)(inside, 3, str(tmp_path)):
        assert "ZeroTrainer.train() is working with the engine of its GPT2LMHeadModel" in text
        assert len(ours) == 4
