"""`stage: auto` under the frameworks: the bits of a run are those of the config that was chosen."""

from __future__ import annotations

import hashlib
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_strategy  # noqa: F401  (names of strategies)
from tests.auto.ranks import limit
from zero_strategy.auto.example import Example
from zero_strategy.config import preset

pl = pytest.importorskip("lightning.pytorch")
from zero_strategy import ZeroAccelerator, ZeroStrategy  # noqa: E402


def net() -> nn.Sequential:
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 1))


def rows() -> TensorDataset:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def digest(module: nn.Module) -> str:
    state = module.state_dict()
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


class Lit(pl.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(strategy: Any, folder: Path) -> tuple[str, Any]:
    torch.manual_seed(4)
    random.seed(4)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=5, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    module = Lit()
    trainer.fit(module, DataLoader(rows(), 4, shuffle=True))
    return digest(module), trainer.strategy.config


def test_a_choice_under_lightning(tmp_path: Path) -> None:
    found, config = fit("zero_auto", tmp_path)
    assert config.origin_of("stage") == "chosen: auto.enabled"
    assert config.chosen["activations"] == "foreseen without memory"
    assert found == fit(ZeroStrategy(stage=config.stage), tmp_path)[0]
    text = ZeroStrategy(stage="auto").explain()
    assert "auto.enabled" in text


def test_an_evaluation_chooses_for_itself(tmp_path: Path) -> None:
    """A fit afterwards is chosen for with a batch of its data."""
    strategy = ZeroStrategy(stage="auto")
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    module = Lit()
    module.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign, assignment]
    trainer.validate(module, DataLoader(rows(), 4), verbose=False)
    assert strategy.config.chosen["activations"].startswith("not known")
    before = digest(module)
    trainer.fit(module, DataLoader(rows(), 4))
    assert strategy.config.chosen["activations"] == "foreseen without memory" and digest(module) != before
    assert strategy.config.auto.enabled is False


def test_a_choice_under_fabric() -> None:
    from lightning.fabric import Fabric

    from zero_strategy.integrations.fabric import ZeroStrategy as ZeroFabricStrategy

    def loss(module: nn.Module, batch: Any) -> Tensor:
        return (module(batch[0]) - batch[1]).square().mean()

    strategy = ZeroFabricStrategy(stage="auto")
    strategy.example = Example(next(iter(DataLoader(rows(), 4))), loss)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    model = net()
    fabric.setup(model, torch.optim.AdamW(model.parameters()))
    assert strategy.config.chosen is not None
    assert strategy.config.chosen["activations"] == "foreseen without memory"


def test_a_choice_under_accelerate() -> None:
    def trained(config: dict[str, Any]) -> tuple[str, Any]:
        accelerator = ZeroAccelerator(zero_config=config, cpu=True)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), 4))
        torch.manual_seed(4)
        for x, y in loader:
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return digest(accelerator.unwrap_model(model)), accelerator.zero_config

    found, config = trained({"stage": "auto"})
    assert config.origin_of("stage") == "chosen: auto.enabled"
    assert found == trained({"stage": config.stage})[0]
    with pytest.raises(ValueError, match=r"auto\.global_batch is 8 .* are those of the loader"):
        trained({"stage": "auto", "auto": {"enabled": True, "global_batch": 8}})


def test_a_choice_under_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from zero_strategy import ZeroTrainer

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2)
    items = [{"input_ids": (ids := [1 + number, 5, 7, 9]), "labels": ids} for number in range(16)]

    def trained(zero: dict[str, Any], rows: int = 2, steps: int = 2) -> tuple[str, Any]:
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(config)
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=rows, gradient_accumulation_steps=steps,
            use_cpu=True, save_strategy="no", disable_tqdm=True, logging_strategy="no", report_to=[],
        )  # fmt: skip
        trainer = ZeroTrainer(model, args, train_dataset=items, zero_config=zero)
        trainer.train()
        return digest(model), trainer.accelerator.zero_config

    found, chosen = trained({"stage": "auto"})
    assert chosen.chosen["activations"] == "foreseen without memory" and chosen.chosen["accumulation"] == 2
    assert found == trained({"stage": chosen.stage})[0]
    # The arguments follow from the batch of a step.
    found, chosen = trained({"stage": "auto", "auto": {"enabled": True, "global_batch": 8}})
    figures = chosen.chosen
    assert figures["rows"] * figures["accumulation"] == 8
    assert found == trained({"stage": chosen.stage}, figures["rows"], figures["accumulation"])[0]
    with pytest.raises(ValueError, match=r"auto\.global_batch is 8 .* are those of reproducible\.slots"):
        trained({"stage": "auto", "auto": {"enabled": True, "global_batch": 8}, "reproducible": 4}, 2, 1)


def test_tiles_that_are_chosen_are_made(tmp_path: Path) -> None:
    """Logits of all tokens have no room."""
    transformers = pytest.importorskip("transformers")
    from zero_strategy import ZeroTrainer

    shape = {"vocab_size": 16384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2)
    ids = torch.randint(16384, (16, 128), generator=torch.Generator().manual_seed(1)).tolist()
    items = [{"input_ids": each, "labels": each} for each in ids]

    def trained(zero: dict[str, Any]) -> tuple[str, Any]:
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(config)
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=1, per_device_train_batch_size=16, use_cpu=True, save_strategy="no",
            disable_tqdm=True, logging_strategy="no", report_to=[],
        )  # fmt: skip
        trainer = ZeroTrainer(model, args, train_dataset=items, zero_config={"mmap_threshold": 0, **zero})
        trainer.train()
        return digest(model), trainer.accelerator.zero_config

    limit(700 << 20)
    try:
        found, chosen = trained({"stage": "auto"})
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    tiles = chosen.activation_checkpointing.tile_tokens
    assert tiles == 256 and chosen.origin_of("activation_checkpointing.tile_tokens") == "chosen: auto.enabled"
    mode = chosen.activation_checkpointing.mode
    pinned = {"stage": chosen.stage, "activation_checkpointing": {"mode": mode, "tile_tokens": tiles}}
    assert found == trained(pinned)[0]
    assert found != trained({"stage": chosen.stage})[0]


def test_the_name_is_a_preset() -> None:
    assert preset("zero_auto") == {"auto": {"enabled": True}}
