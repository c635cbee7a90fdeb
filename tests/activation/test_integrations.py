"""Every integration hands the settings on; models of transformers, which collect keys and values, are recomputed."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.activation.unit_nets import WIDTH, Transformer, seeded
from tests.engine.nets import loss_of
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.full_state import safe_get_full_grad

MODES: list[dict[str, Any]] = [
    {"mode": "none"},
    {"mode": "full"},
    {"mode": "selective"},
    {"mode": "every_n", "every_n": 2},
    {"mode": "budget", "budget": 0.6},
]
UNITS = {"min_numel": 0}


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def with_trainer(mode: dict[str, Any], folder: str) -> dict[str, Tensor]:
    from lightning.pytorch import LightningModule, Trainer

    import zero_strategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(Transformer, 3)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return loss_of(self.net(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(4)
    strategy = zero_strategy.ZeroStrategy(stage=3, units=UNITS, activation_checkpointing=mode)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, precision="bf16-mixed", **quiet)
    trainer.fit(Module(), DataLoader(torch.randn(12, 5, WIDTH), batch_size=4))  # type: ignore[arg-type]
    assert strategy.engine is not None
    assert bool(strategy.engine.activations.recomputed) == (mode["mode"] != "none")
    return strategy.engine.full_state_dict()


def with_fabric(mode: dict[str, Any], folder: str) -> dict[str, Tensor]:
    from lightning.fabric import Fabric

    from zero_strategy.integrations.fabric import ZeroStrategy

    strategy = ZeroStrategy(stage=2, units=UNITS, activation_checkpointing=mode)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    model = seeded(Transformer, 3)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    torch.manual_seed(4)
    for _ in range(3):
        fabric.backward(loss_of(model(torch.randn(4, 5, WIDTH))))
        optimizer.step()
        optimizer.zero_grad()
    assert bool(strategy.engines[0].activations.recomputed) == (mode["mode"] != "none")
    return strategy.engines[0].full_state_dict()


def with_accelerate(mode: dict[str, Any], folder: str) -> dict[str, Tensor]:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from zero_strategy.integrations.accelerate import ZeroAccelerator

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    settings = {"stage": 3, "units": UNITS, "activation_checkpointing": mode}
    accelerator = ZeroAccelerator(cpu=True, zero_config=settings, mixed_precision="bf16")
    model = seeded(Transformer, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    torch.manual_seed(4)
    for _ in range(3):
        accelerator.backward(loss_of(model(torch.randn(4, 5, WIDTH)).float()))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Tensor] = accelerator.get_state_dict(model)
    return {name: value.clone() for name, value in found.items()}


def integrations(folder: str) -> dict[str, list[str]]:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    os.environ.update(dict(zip(keys, "00110", strict=True)), MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
    wrong = {}
    for integration in (with_trainer, with_fabric, with_accelerate):
        expected = integration(MODES[0], folder)
        for mode in MODES[1:]:
            if found := different(integration(mode, folder), expected):
                wrong[f"{integration.__name__} {mode}"] = found
    return wrong


def test_integrations(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(1)(integrations, str(tmp_path)) == [{}]


def gradients_of(model: nn.Module, mode: dict[str, Any], **inputs: Any) -> tuple[ZeroEngine, dict[str, Tensor]]:
    torch.manual_seed(1)
    engine = ZeroEngine(model, load_config(stage=3, units=UNITS, activation_checkpointing=mode))
    model(**inputs).loss.backward()
    found = {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
    return engine, {name: gradient for name, gradient in found.items() if gradient is not None}


def language_models() -> list[str]:
    import transformers

    transformers.logging.set_verbosity_error()
    small = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 40}
    llama = transformers.LlamaConfig(**small, intermediate_size=24, num_key_value_heads=1, attention_dropout=0.1)
    gpt2 = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=40, n_positions=16)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
    t5 = transformers.T5Config(**sizes, decoder_start_token_id=0)
    tokens = torch.arange(14).view(2, 7)
    inputs = {"input_ids": tokens, "labels": tokens}
    wrong = []
    for kind, config in (("LlamaForCausalLM", llama), ("GPT2LMHeadModel", gpt2), ("T5ForConditionalGeneration", t5)):
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config).train()
        assert config.use_cache is not False
        _, expected = gradients_of(copy.deepcopy(model), MODES[0], **inputs)
        for mode in MODES[1:]:
            engine, found = gradients_of(copy.deepcopy(model), mode, **inputs)
            assert engine.activations.recomputed
            wrong += [f"{kind} {mode} {name}" for name in different(found, expected)]
    prefix = transformers.DynamicCache(config=gpt2)
    for layer in range(3):
        prefix.update(torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8), layer)
    model = transformers.GPT2LMHeadModel(gpt2)
    with pytest.raises(ValueError, match=r"unit 'transformer.h.0' is given keys and values from outside"):
        gradients_of(model, MODES[1], **inputs, past_key_values=prefix)
    return wrong


def test_models_of_transformers(ranks: Launcher) -> None:
    assert ranks(1, timeout=120)(language_models) == [[]]
