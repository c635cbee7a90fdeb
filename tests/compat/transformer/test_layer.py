"""The layer's output and all gradients are those of plain torch, for every combination of options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.compat.transformer.reference_layer import bytes_kept, plain_layer
from tests.ops.native import need_native
from zero_strategy.compat.deepspeed.transformer.config import TransformerConfig
from zero_strategy.compat.deepspeed.transformer.layer import TransformerLayer, draw_states, rotary_tables

ROWS, LENGTH, WIDTH, HEADS = 2, 7, 16, 4
SPREAD = 0.16  # a matrix of this width then stretches as one of 1024 with 0.02 does
ERROR = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
SAVING = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint")


def config(**options: Any) -> TransformerConfig:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "heads": HEADS, "num_hidden_layers": 2}
    return TransformerConfig(**{**sizes, "initializer_range": SPREAD, **options})  # type: ignore[arg-type]


def layer(**options: Any) -> TransformerLayer:
    """With biases and norms that are not what they begin with."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    made = TransformerLayer(config(**options))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
                assert name in ("attn_nw", "norm_w") or name.endswith("b")
    return made


def inputs(dtype: torch.dtype, rows: int = ROWS, length: int = LENGTH, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, gradient = (torch.randn(rows, length, width, generator=generator).to(dtype) for _ in range(2))
    return x.requires_grad_(), gradient


def wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)


def error(actual: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """Relative, in the norm of the full tensor."""
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=least))


def largest_error(
    options: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    mask: Tensor | None = None,
    *,
    plain: bool = False,
) -> tuple[float, str]:
    """Of the output and of every gradient, against plain torch in float64; `plain`: plain torch in that dtype."""
    made = layer(**options).to(dtype)
    x, gradient = inputs(dtype)
    torch.manual_seed(3)
    states = draw_states(made.config.seed)
    torch.manual_seed(3)
    if plain:
        low = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        output = plain_layer(made._parameters, made.config, x, low, states)
    else:
        output = made(x, mask)
        assert isinstance(output, tuple) == made.config.huggingface
        output = output[0] if made.config.huggingface else output
    names = dict(made.named_parameters())
    found = [output, *torch.autograd.grad(output, [x, *names.values()], gradient)]
    weights = {name: wide(getattr(made, name)) for name in made._parameters}
    leaves = [wide(x), *(weights[name] for name in names)]
    exact_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    exact = plain_layer(weights, made.config, leaves[0], exact_mask, states)  # type: ignore[arg-type]
    expected = [exact, *torch.autograd.grad(exact, leaves, gradient.double())]  # type: ignore[arg-type]
    assert found[0].dtype == dtype
    # A gradient that is nothing but rounding (of the keys' bias) is measured by the others.
    least = 1e-3 * max(float(part.detach().norm()) for part in expected[1:])
    errors = [error(a.detach(), b.detach(), least) for a, b in zip(found, expected, strict=True)]
    return max(zip(errors, ["output", "input", *names], strict=True))


def masks() -> list[Tensor | None]:
    """None, by key, and as BERT's old code adds it."""
    seen = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    seen[1, 4:] = False
    return [None, seen, torch.where(seen, 0.0, -10000.0)[:, None, None, :]]


def combinations(**values: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


ON_OFF = (True, False)
NO_DROPOUT = {"attn_dropout_ratio": 0.0, "hidden_dropout_ratio": 0.0}
DROPOUT = {"attn_dropout_ratio": 0.2, "hidden_dropout_ratio": 0.1}
LLAMA = {"norm": "rms_norm", "activation": "swiglu", "position": "rotary", "causal": True, "bias": False}
DOCUMENTED = [
    {**options, **dropout}
    for options in combinations(pre_layer_norm=ON_OFF, **dict.fromkeys(SAVING, ON_OFF), huggingface=ON_OFF)
    for dropout in (NO_DROPOUT, DROPOUT, {"attn_dropout_ratio": 0.3}, {"hidden_dropout_ratio": 0.2})
]
BEYOND = [
    {**options, **dict.fromkeys(SAVING, saving), **DROPOUT}
    for saving in ON_OFF
    for options in combinations(
        norm=("layer_norm", "rms_norm"), activation=("gelu", "gelu_tanh", "swiglu"), position=("none", "rotary"),
        causal=ON_OFF, key_value_heads=(-1, 2, 1), bias=ON_OFF,
    )
]  # fmt: skip


@pytest.fixture(autouse=True)
def native() -> None:
    need_native()


@pytest.mark.parametrize("combined", [DOCUMENTED, BEYOND], ids=["documented", "beyond"])
def test_every_combination_is_plain_torch_within_rounding(combined: list[dict[str, Any]]) -> None:
    for options, mask in zip(combined, cycle(masks())):
        found, where = largest_error(options, mask=mask)
        assert found <= ERROR[torch.float32], (where, found, options)


def test_every_documented_combination_in_bfloat16() -> None:
    for options, mask in zip(DOCUMENTED, cycle(masks())):
        found, where = largest_error(options, torch.bfloat16, mask)
        assert found <= ERROR[torch.bfloat16], (where, found, options)


def test_combinations_beyond_in_bfloat16() -> None:
    """Within 1e-2, or near what plain torch itself is off by: a single head of keys sums up many roundings."""
    for options, mask in zip(BEYOND[::2], cycle(masks())):
        found, where = largest_error(options, torch.bfloat16, mask)
        if found > ERROR[torch.bfloat16]:
            theirs, _ = largest_error(options, torch.bfloat16, mask, plain=True)
            assert found <= 1.5 * theirs, (where, found, theirs, options)


def test_stochastic_mode_without_dropout_is_the_same() -> None:
    for options in combinations(pre_layer_norm=ON_OFF, **dict.fromkeys(SAVING, ON_OFF)):
        assert largest_error({**options, "stochastic_mode": True})[0] <= ERROR[torch.float32]


def test_a_mask_may_be_learned() -> None:
    """As relative positions are: its gradient does not depend on how attention is computed."""
    gradients = []
    for recompute in ON_OFF:
        bias = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(4), requires_grad=True)
        torch.manual_seed(3)
        output = layer(attn_dropout_checkpoint=recompute, **DROPOUT)(inputs(torch.float32)[0], bias)
        gradients.append(torch.autograd.grad(output.square().sum(), bias)[0])
    assert error(gradients[0], gradients[1].double()) <= ERROR[torch.float32]


def test_positions_may_be_given() -> None:
    made = layer(**LLAMA)
    x, _ = inputs(torch.float32)
    cos, sin = rotary_tables(2 * LENGTH, WIDTH // HEADS, 10000.0, x.device)
    assert torch.equal(made(x, position_embeddings=(cos[:, :LENGTH], sin[:, :LENGTH])), made(x))
    later = made(x, position_embeddings=(cos[:, LENGTH:], sin[:, LENGTH:]))
    assert error(later.detach(), made(x).detach().double()) < 1e-6  # only distances count


# ---- memory ----

MEASURED = {"hidden_size": 128, "heads": 2, "intermediate_size": -1, **DROPOUT}


def kept_bytes(length: int = 128, **options: Any) -> tuple[int, int]:
    """By the layer, and by its reference in plain torch, whose dropout masks are a byte per element."""
    made = layer(**MEASURED, **options)
    x, _ = inputs(torch.float32, length=length, width=128)
    own = list(made.parameters())
    return (
        bytes_kept(made, x, parameters=own),
        bytes_kept(lambda x: plain_layer(made._parameters, made.config, x), x, parameters=own),
    )


@pytest.mark.parametrize("pre_layer_norm", ON_OFF)
def test_the_options_together_keep_at_most_60_percent(pre_layer_norm: bool) -> None:
    ours, theirs = kept_bytes(pre_layer_norm=pre_layer_norm, **dict.fromkeys(SAVING, True))
    assert ours <= 0.6 * theirs, (ours, theirs)


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["bert", "llama"])
def test_each_option_drops_what_it_says(family: dict[str, Any]) -> None:
    """Elements of (rows, length, hidden) that are no longer kept."""
    unit = ROWS * 128 * 128 * 4
    for pre in ON_OFF:
        without, _ = kept_bytes(pre_layer_norm=pre, **family)
        kept = {name: kept_bytes(pre_layer_norm=pre, **family, **{name: True})[0] for name in SAVING}
        dropped = {name: (without - found) / unit for name, found in kept.items()}
        assert dropped["gelu_checkpoint"] >= 4  # the activation's output; what swiglu keeps beside it
        assert dropped["attn_dropout_checkpoint"] == 4  # probabilities of 2 heads, before and after dropout
        # The inputs of both norms, but for that of the layer, which is the caller's; post: the second output is new.
        assert dropped["normalize_invertible"] >= (1.9 if pre else 0.9)


def test_what_is_kept_is_no_more_than_the_twin_s_without_options() -> None:
    for family in ({}, LLAMA):
        for pre in ON_OFF:
            ours, theirs = kept_bytes(pre_layer_norm=pre, **family)
            assert ours <= theirs


# ---- dropout ----


def test_masks_are_a_function_of_the_seed_and_of_torch_s() -> None:
    x, _ = inputs(torch.float32)

    def run(seed: int, torch_seed: int) -> Tensor:
        made = layer(seed=seed, **DROPOUT)
        torch.manual_seed(torch_seed)
        return made(x).detach()

    first = run(1, 1)
    assert torch.equal(first, run(1, 1))
    assert not torch.equal(first, run(2, 1)) and not torch.equal(first, run(1, 2))
    made = layer(seed=1, **DROPOUT)
    assert not torch.equal(made(x), made(x))  # another mask in every forward
    assert torch.equal(made.eval()(x), made(x))
    before = torch.get_rng_state()
    made(x)
    assert torch.equal(torch.get_rng_state(), before)  # nothing drawn where nothing is dropped


def test_recomputation_of_the_whole_layer_meets_the_same_masks() -> None:
    for options in (dict.fromkeys(SAVING, True), {}):
        made = layer(**DROPOUT, **options)
        x, gradient = inputs(torch.float32)
        results = []
        for recompute in ON_OFF:
            torch.manual_seed(3)
            output = checkpoint(made, x, use_reentrant=False) if recompute else made(x)
            results.append([output, *torch.autograd.grad(output, [x, *made.parameters()], gradient)])
        assert all(torch.equal(*both) for both in zip(*results, strict=True))


def test_stochastic_mode_draws_from_torch_s_generator_alone() -> None:
    x, _ = inputs(torch.float32)
    results = []
    for seed in (1, 2):
        made = layer(stochastic_mode=True, attn_dropout_ratio=0.5, seed=seed)
        torch.manual_seed(3)
        results.append(made(x))
    assert torch.equal(*results)


# ---- dtypes, compiling, frozen parameters ----


def test_computing_in_half_precision_leaves_input_and_weights() -> None:
    x, _ = inputs(torch.float32)
    exact = layer()(x)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        made = layer(**{name: True})
        seen: list[torch.dtype] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t.dtype) or t, lambda t: t)
        with hooks:
            output = made(x)
        assert output.dtype == torch.float32 and made.attn_ow.dtype == torch.float32 and dtype in seen
        assert 0 < error(output.detach(), exact.detach().double()) < 1e-2
        output.sum().backward()
        assert {parameter.grad.dtype for parameter in made.parameters() if parameter.grad is not None} == {x.dtype}


def test_autocast_is_followed() -> None:
    x, _ = inputs(torch.float32)
    made, low = layer(), layer(bf16=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = made(x)
    assert output.dtype == torch.float32 and torch.equal(output, low(x))


@pytest.mark.parametrize("saving", ON_OFF)
def test_layer_compiling_breaks_no_graph(saving: bool) -> None:
    torch._dynamo.reset()
    for family in ({}, LLAMA):
        made = layer(**dict.fromkeys(SAVING, saving), **DROPOUT, **family)
        compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
        x, gradient = inputs(torch.float32)
        results = []
        for each in (made, compiled):
            torch.manual_seed(3)
            output = each(x)
            results.append([output, *torch.autograd.grad(output, [x, *made.parameters()], gradient)])
        assert all(error(a.detach(), b.detach().double()) <= 1e-6 for a, b in zip(*results, strict=True))


def test_frozen_parameters_get_no_gradient_and_change_none() -> None:
    x, gradient = inputs(torch.float32)
    for family in ({}, LLAMA):
        made = layer(**dict.fromkeys(SAVING, True), **family)
        whole = dict(zip(dict(made.named_parameters()), torch.autograd.grad(made(x), made.parameters(), gradient)))
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name in ("attn_qkvw", "attn_nw"))
        made(x.detach()).backward(gradient)
        for name, parameter in made.named_parameters():
            assert parameter.grad is None if not parameter.requires_grad else torch.equal(parameter.grad, whole[name])
