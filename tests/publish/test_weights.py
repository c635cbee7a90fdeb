"""Whole weights, unit by unit: bits, names and order against one plain process, PEFT and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.engine.nets import loss_of, net
from tests.fsdp.test_tensor_parallel import begin
from tests.launcher import Launcher
from zero_strategy import ZeroEngine

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def llama(tied: bool = False) -> Any:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)
    )


def mixtral() -> Any:
    torch.manual_seed(1)
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4))


def gpt2() -> Any:
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4))


def adapted(kind: str) -> Any:
    """A model with adapters that change something."""
    kinds: dict[str, dict[str, Any]] = {
        "linear": {"target_modules": ["q_proj", "down_proj"]},
        "all": {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
        "dora": {"target_modules": ["v_proj"], "use_dora": True},
        "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
        "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 5]}},
        "conv1d": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    }
    base = gpt2() if kind == "conv1d" else llama()
    model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, **kinds[kind]))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "trainable_tokens_delta" in name or "magnitude" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with each tensor once."""
    seen: set[int] = set()
    return {n: t for n, t in state.items() if t.data_ptr() not in seen and not seen.add(t.data_ptr())}  # type: ignore[func-returns-value]


def given(engine: ZeroEngine, **options: Any) -> dict[str, Tensor]:
    weights = engine.weights(**options)
    found = {}
    for (name, tensor), spec in zip(weights, weights.specs, strict=True):
        assert (name, tensor.dtype, tuple(tensor.shape)) == (spec.name, spec.dtype, spec.shape)
        found[name] = tensor.clone()
    assert len(found) == len(weights)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different


def plain(stage: int) -> int:
    """Weights of a trained model with buffers; the most units that were whole at once beside the root."""
    torch.manual_seed(0)
    model = nn.Sequential(net(), nn.BatchNorm1d(3))
    engine = ZeroEngine(model, {"stage": stage, "units": {"min_numel": 1}})
    expected = engine.full_state_dict()
    assert_same(given(engine), expected)
    rounded = {name: t.bfloat16() if t.is_floating_point() else t for name, t in expected.items()}
    assert_same(given(engine, dtype=torch.bfloat16), rounded)
    chosen = list(expected)[3:5]
    assert_same(given(engine, names=chosen), {name: expected[name] for name in chosen})
    most = max(sum(unit.gathered for unit in engine.model.units) for _ in engine.weights())
    assert stage < 3 or not any(unit.gathered for unit in engine.model.units)
    inner = given(engine, module=model[0])
    assert_same(inner, {name[2:]: tensor for name, tensor in expected.items() if name.startswith("0.")})
    with pytest.raises(ValueError, match=r"no weight '0.stem.weigh'; did you mean '0\.stem\.weight'"):
        engine.weights(names=["0.stem.weigh"])
    with pytest.raises(TypeError, match="floating-point"):
        engine.weights(dtype=torch.int8)
    with pytest.raises(ValueError, match="no part"):
        engine.weights(module=nn.Linear(1, 1))
    return most


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_the_state_dicts_with_one_unit_whole(ranks: Launcher, stage: int) -> None:
    found = ranks(2)(plain, stage)
    assert stage < 3 or found == [1, 1]


def with_adapters(stage: int, kind: str) -> None:
    model = adapted(kind)
    engine = ZeroEngine(model, {"stage": stage})
    expected = untied(adapted(kind).merge_and_unload().state_dict())
    assert_same(given(engine), expected)
    before = engine.full_state_dict()
    assert_same(given(engine), expected)  # merged into copies: once more, and the base is what it was
    assert_same(engine.full_state_dict(), before)
    assert_same(given(engine, merge_adapters=False), untied({n: before[n] for n in before}))


@pytest.mark.parametrize("kind", ["linear", "all", "dora", "embedding", "tokens", "conv1d"])
def test_adapters_are_merged_as_peft_merges_them(ranks: Launcher, kind: str) -> None:
    ranks(2)(with_adapters, 3, kind)


def test_adapters_are_merged_where_parameters_are_whole(ranks: Launcher) -> None:
    ranks(2)(with_adapters, 2, "all")


def prompts() -> str:
    model: PeftModel = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    engine = ZeroEngine(model, {"stage": 3})
    with pytest.raises(ValueError, match="merge_adapters=False") as refused:
        engine.weights()
    assert "base_model.lm_head.weight" in given(engine, merge_adapters=False)
    return str(refused.value)


def test_adapters_that_belong_to_no_weight_are_refused(ranks: Launcher) -> None:
    assert all("'default' (PromptTuningConfig)" in text for text in ranks(2)(prompts))


def stacked(folder: str) -> None:
    from safetensors.torch import load_file

    engine = ZeroEngine(mixtral(), {"stage": 3})
    found = given(engine)
    assert_same(found, load_file(f"{folder}/model.safetensors"))
    assert any("experts.3.w2" in name for name in found)
    one = [name for name in found if "layers.1" in name and "experts.2" in name]
    assert_same(given(engine, names=one), {name: found[name] for name in one})


def test_names_are_those_of_transformers_checkpoints(ranks: Launcher, tmp_path: Any) -> None:
    mixtral().save_pretrained(tmp_path)
    ranks(2)(stacked, str(tmp_path))


def tied() -> list[str]:
    engine = ZeroEngine(llama(tied=True), {"stage": 3})
    assert_same(given(engine), untied(llama(tied=True).state_dict()))
    return [spec.name for spec in engine.weights().specs]


def test_tied_weights_come_once(ranks: Launcher) -> None:
    for names in ranks(2)(tied):
        assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def elsewhere(case: str) -> None:
    """Weights of a trained model, of which parts lie in other places."""
    options: dict[str, Any] = {
        "replicas": {"mesh": {"replicate": 2}},
        "host memory": {"offload": {"parameters": "cpu", "optimizer": "cpu"}},
        "averages": {},
        "left early": {},
        "gathered": {"reshard_after_forward": False},
    }[case]
    model = net()
    engine = ZeroEngine(model, {"stage": 3, "units": {"min_numel": 1}, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    average = engine.average_weights(0.5) if case == "averages" else None
    for step in range(3):
        loss_of(model(torch.full((2, 6), step + 1.0))).backward()
        if step == 1:
            assert_same(given(engine), engine.full_state_dict())  # between a backward and its step
        optimizer.step()
        optimizer.zero_grad()
    if average is not None:
        with average.applied():
            averaged = engine.full_state_dict()
            assert_same(given(engine), averaged)
        assert any(not torch.equal(tensor, averaged[name]) for name, tensor in given(engine).items())
    if case == "left early":
        for number, _ in enumerate(engine.weights()):
            if number == 3:
                break
        assert not any(unit.gathered for unit in engine.model.units)
    assert_same(given(engine), engine.full_state_dict())
    loss_of(model(torch.ones(2, 6))).backward()  # training goes on
    optimizer.step()
    if case == "gathered":
        engine.offload_states(["lp_params"])
        with pytest.raises(RuntimeError, match="reload_states"):
            given(engine)
        engine.reload_states()
    assert_same(given(engine), engine.full_state_dict())


@pytest.mark.parametrize("case", ["replicas", "host memory", "averages", "left early", "gathered"])
def test_weights_come_from_wherever_they_lie(ranks: Launcher, case: str) -> None:
    ranks(4 if case == "replicas" else 2)(elsewhere, case)


def divided() -> None:
    model, engine, _, _ = begin(3)
    found = given(engine)
    expected = engine.full_state_dict()
    assert_same(found, {name: expected[name] for name in found})
    assert type(found["blocks.0.up.weight"]) is Tensor
    assert found["blocks.0.up.weight"].shape == dict(model.named_parameters())["blocks.0.up.weight"].shape


def test_weights_that_tensor_parallelism_divides_are_whole(ranks: Launcher) -> None:
    ranks(4)(divided)


def one_rank_stays_away() -> str:
    engine = ZeroEngine(net(), {"stage": 3, "units": {"min_numel": 1}, "barrier_seconds": 2})
    if engine.mesh.rank == 1:
        return ""
    with pytest.raises(RuntimeError) as refused:
        next(iter(engine.weights()))
    return str(refused.value)


def test_weights_rank_that_does_not_come_is_named(ranks: Launcher) -> None:
    text, _ = ranks(2)(one_rank_stays_away)
    assert "weights()" in text and "1" in text
