"""Hugging Face models as layers: the same bits as the models' own forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import zero_strategy
from zero_strategy.checkpoint.deferred import is_deferred
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.huggingface.pretrained import from_pretrained, pipeline_layers, pipeline_loss
from zero_strategy.pipeline.module import PipelineModule

VOCABULARY, BATCH, LENGTH = 23, 3, 6


def build(kind: str, attention: str = "sdpa", **options: Any) -> Any:
    torch.manual_seed(3)
    common = {"vocab_size": VOCABULARY, "attn_implementation": attention, "pad_token_id": 0}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            n_embd=8, n_layer=3, n_head=2, n_positions=16, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
            bos_token_id=1, eos_token_id=2, **common, **options,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=16, bos_token_id=1, eos_token_id=2, **common, **options,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    config = transformers.BertConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **common, **options,
    )  # fmt: skip
    name = "BertForMaskedLM" if kind == "bert" else "BertForSequenceClassification"
    return getattr(transformers, name)(config)


def batch(kind: str, extra: str) -> dict[str, Tensor]:
    torch.manual_seed(8)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    labels = torch.tensor([0, 1, 1]) if kind == "classes" else torch.where(ids % 4 == 0, -100, ids)
    found = {"input_ids": ids, "labels": labels}
    if extra == "mask":
        found["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[6], [4], [2]])).long()
    if extra == "positions":
        found["position_ids"] = torch.arange(2, LENGTH + 2).unsqueeze(0)
    if extra == "types":
        found["token_type_ids"] = ids % 2
    return found


def run(layers: list[Any], stages: int, inputs: Any) -> tuple[Any, list[PipelineModule]]:
    parts = [PipelineModule(layers, stages, rank=rank) for rank in range(stages)]
    for part in parts:
        inputs = part(inputs)
    return inputs, parts


KINDS = ["gpt2", "llama", "bert", "classes"]
CASES = [
    (kind, extra)
    for kind in KINDS
    for extra in ("nothing", "mask", "positions", "types")
    if (kind, extra) != ("llama", "types")  # Llama has no token types
]


@pytest.mark.parametrize(("kind", "extra"), CASES)
@pytest.mark.parametrize(("attention", "training"), [("sdpa", True), ("eager", False)])
def test_bits_are_the_model_s(kind: str, extra: str, attention: str, training: bool) -> None:
    model, inputs = build(kind, attention), batch(kind, extra)
    model.train(training)
    expected = model(**inputs)
    expected.loss.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for stages in (1, 3):
        logits, _ = run(pipeline_layers(model), stages, inputs)
        loss = pipeline_loss(model)(logits, inputs["labels"])
        assert torch.equal(logits, expected.logits) and torch.equal(loss, expected.loss)
        loss.backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
        model.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_the_model_s(kind: str) -> None:
    model = build(kind, **({"tie_word_embeddings": True} if kind == "llama" else {}))
    _, parts = run(pipeline_layers(model), 2, batch(kind, "nothing"))
    states = [part.state_dict() for part in parts]
    assert set().union(*states) == set(model.state_dict())
    tied = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}
    tied["bert"] = "bert.embeddings.word_embeddings.weight"
    assert [tie.key for tie in parts[1].ties] == ([tied[kind]] if kind in tied else [])
    if kind in tied:
        head = "cls.predictions.decoder.weight" if kind == "bert" else "lm_head.weight"
        assert parts[1].ties[0].local_names == {tied[kind]: head}


def test_a_checkpoint_loads_into_the_model() -> None:
    model, other = build("llama"), build("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    _, parts = run(pipeline_layers(model), 3, batch("llama", "nothing"))
    other.load_state_dict({name: value for part in parts for name, value in part.state_dict().items()})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_stage_reads_its_own_weights_alone(tmp_path: Path, kind: str) -> None:
    model = build(kind)
    model.save_pretrained(tmp_path)
    expected, states, elements = model.state_dict(), [], 0
    for rank in range(2):
        waiting = from_pretrained(type(model), str(tmp_path))
        part = PipelineModule(pipeline_layers(waiting), 2, rank=rank)
        assert is_deferred(part)
        assert sum(p.untyped_storage().nbytes() for p in part.parameters()) < 10 * len(list(part.parameters()))
        with pytest.raises(RuntimeError, match="are not read yet"):
            part(batch(kind, "nothing") if rank == 0 else {"hidden_states": torch.zeros(1, 2, 8)})
        ZeroEngine(part, zero_strategy.ZeroConfig(stage=0))
        assert not is_deferred(part)
        states.append(part.state_dict())
        elements += sum(parameter.numel() for parameter in part.parameters())
    assert set().union(*states) == set(expected)
    assert all(torch.equal(value, expected[name]) for state in states for name, value in state.items())
    tied = sum(tie.numel() for tie in part.ties[0].weights.values()) if part.ties else 0
    assert elements == sum(parameter.numel() for parameter in model.parameters()) + tied


def test_input_ids_alone_and_recomputation() -> None:
    model, inputs = build("gpt2"), batch("gpt2", "nothing")["input_ids"]
    whole = PipelineModule(pipeline_layers(model), 1, activation_checkpoint_interval=1)
    output = whole(inputs)
    assert torch.equal(output, model(inputs).logits)
    output.sum().backward()
    found = model.lm_head.weight.grad.clone()
    model.zero_grad()
    model(inputs).logits.sum().backward()
    assert torch.equal(found, model.lm_head.weight.grad)


def test_dropout_is_the_layers_own() -> None:
    model = build("bert")
    model.config.hidden_dropout_prob = 0.5
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    whole = PipelineModule(pipeline_layers(model), 1)
    inputs = batch("bert", "mask")
    torch.manual_seed(1)
    first = model.train()(**inputs).logits
    torch.manual_seed(1)
    assert torch.equal(first, whole.train()(inputs))
    assert torch.equal(whole.eval()(inputs), whole(inputs)) and not torch.equal(first, whole(inputs))


@pytest.mark.parametrize(
    ("problem", "labels", "classes"),
    [
        ("regression", torch.tensor([0.5, 1.0, 2.0]), 1),
        ("single_label_classification", torch.tensor([0, 2, 1]), 3),
        ("multi_label_classification", torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]), 2),
    ],
)
def test_losses_of_classification(problem: str, labels: Tensor, classes: int) -> None:
    inputs = {**batch("classes", "mask"), "labels": labels}
    for given in (None, problem):
        model = build("classes", num_labels=classes, problem_type=given)
        loss_of = pipeline_loss(model)  # before the model has guessed what the labels mean
        expected = model(**inputs)
        assert torch.equal(loss_of(expected.logits, {"labels": labels}), expected.loss)


def test_pipeline_model_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="no pipeline recipe for Linear, only for GPT2LMHeadModel, LlamaForCausalLM"):
        pipeline_layers(torch.nn.Linear(2, 2))
    layers = pipeline_layers(build("llama"))
    with pytest.raises(TypeError, match="takes input_ids, or a dict that has them, not list"):
        layers[0]([1, 2])
    with pytest.raises(ValueError, match=r"does not take \['inputs_embeds'\]"):
        layers[0]({**batch("llama", "nothing"), "inputs_embeds": torch.zeros(1)})
    with pytest.raises(ValueError, match="no cross-attention"):
        pipeline_layers(build("gpt2", add_cross_attention=True))
    with pytest.raises(TypeError, match="the loss takes labels"):
        pipeline_loss(build("llama"))(torch.zeros(1, 2, VOCABULARY), None)
