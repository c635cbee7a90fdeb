"""Tensor-parallel shards: dividing and joining are inverse, and what does not fit is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_strategy.convert.megatron import MergeRules, Rule, SubparamShape, merge, merged_shape, split


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def fused(sizes: tuple[int, ...] | int, dim: int = 0) -> SubparamShape:
    shape: list[Any] = [-1, -1]
    shape[dim] = sizes
    return SubparamShape((".*",), tuple(shape), dim)


@given(
    degree=st.integers(1, 4),
    rows=st.integers(0, 3),
    columns=st.integers(1, 3),
    kind=st.sampled_from(["column", "row", "halves"]),
)
def test_split_then_merge_is_the_identity(degree: int, rows: int, columns: int, kind: Any) -> None:
    whole = numbered(2 * degree * rows, degree * columns)
    shards = split("w", whole, Rule(kind), degree)
    assert len(shards) == degree
    assert torch.equal(merge("w", shards, Rule(kind)), whole)
    assert merged_shape("w", [shard.shape for shard in shards], Rule(kind)) == whole.shape


@given(degree=st.integers(1, 4), data=st.data())
def test_sub_parameters_of_any_widths(degree: int, data: st.DataObject) -> None:
    ranks = st.lists(st.integers(0, 3), min_size=degree, max_size=degree).map(tuple)
    widths = tuple(data.draw(st.lists(ranks, min_size=1, max_size=3)))
    dim = data.draw(st.integers(0, 1))
    sizes = tuple(sum(per_rank) for per_rank in widths)
    rule = Rule("sub_params", fused(sizes, dim), widths)
    whole = numbered(sum(sizes), 5) if dim == 0 else numbered(5, sum(sizes))
    assert torch.equal(merge("w", split("w", whole, rule, degree), rule), whole)


@given(degree=st.integers(1, 4), vocabulary=st.integers(1, 9))
def test_the_vocabulary_is_padded_and_cut(degree: int, vocabulary: int) -> None:
    rule = Rule(vocabulary_size=vocabulary)
    whole = numbered(vocabulary, 3)
    shards = split("w", whole, rule, degree)
    assert {shard.shape[0] for shard in shards} == {-(-vocabulary // degree)}
    assert torch.equal(merge("w", shards, rule), whole)
    assert merged_shape("w", [shard.shape for shard in shards], rule) == whole.shape


def test_each_way_of_dividing_by_hand() -> None:
    a, b = numbered(2, 2), numbered(2, 2) + 10
    assert merge("w", [a, b], Rule("column")).tolist() == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert merge("w", [a, b], Rule("row")).tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert merge("w", [a, b], Rule("halves")).tolist() == [[0, 1], [10, 11], [2, 3], [12, 13]]
    assert merge("w", [a, b], Rule("average")).tolist() == [[5, 6], [7, 8]]
    assert merge("w", [a, a.clone()], Rule("replicated")) is a
    assert merged_shape("w", [(3, 2), (3, 2)], Rule("replicated", vocabulary_size=2)) == (2, 2)
    rule = Rule("sub_params", fused((1, 3)), ((1, 0), (1, 2)))
    assert merge("w", [a, b], rule).tolist() == [[0, 1], [2, 3], [10, 11], [12, 13]]
    rule = Rule("sub_params", fused((2, 2)), ((1, 1), (1, 1)))
    assert merge("w", [a, b], rule).tolist() == [[0, 1], [10, 11], [2, 3], [12, 13]]
    assert torch.equal(merge("w", [a, b], Rule("sub_params", fused(2))), merge("w", [a, b], rule))


def test_an_average_of_low_precision_is_taken_in_fp32() -> None:
    shards = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)]
    assert merge("w", shards, Rule("average")).tolist() == [86.0]


def test_copies_with_equal_nan_are_equal_and_others_are_refused() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert merge("w", [nan, nan.clone()], Rule("replicated")) is nan
    with pytest.raises(ValueError, match=r"'norm.w' is replicated.* ranks 0 and 1 differ in 1 of 2"):
        merge("norm.w", [torch.zeros(2), torch.tensor([0.0, 1.0])], Rule("replicated"))


@pytest.mark.parametrize(
    ("rule", "shards", "message"),
    [
        (Rule("column"), [], "no shards"),
        (Rule("column"), [torch.zeros(2, 3), torch.zeros(2, 4)], "do not fit together"),
        (Rule("row"), [torch.zeros(2, 3), torch.zeros(3, 3)], "do not fit together"),
        (Rule("row"), [torch.zeros(2), torch.zeros(2)], "dimension 1"),
        (Rule("column"), [torch.zeros(()), torch.zeros(())], "dimension 0"),
        (Rule("average"), [torch.zeros(2), torch.zeros(3)], "do not fit together"),
        (Rule("column"), [torch.zeros(2), torch.zeros(2).half()], "different dtypes"),
        (Rule("halves"), [torch.zeros(3), torch.zeros(3)], "two equal halves"),
        (Rule(vocabulary_size=5), [torch.zeros(2, 1), torch.zeros(2, 1)], "fewer rows than the vocabulary, 5"),
        (Rule("sub_params", fused((3, 3))), [torch.zeros(3, 1), torch.zeros(3, 1)], "no sub_param_shard_widths"),
        (Rule("sub_params", fused((3, 4))), [torch.zeros(3, 1), torch.zeros(3, 1)], "do not add up to 6"),
        (Rule("sub_params", fused(4)), [torch.zeros(3, 1), torch.zeros(3, 1)], "4 equal sub-parameters"),
        (Rule("sub_params", fused((3, 3)), ((1, 2), (1, 2))), [torch.zeros(3, 1)] * 2, "rank 0 holds 3"),
        (Rule("sub_params", fused((3, 3)), ((3,), (3,))), [torch.zeros(3, 1)] * 2, "do not describe"),
        (Rule("sub_params", fused((3, 3), 1), ((3,), (3,))), [torch.zeros(6)], "dimension 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(rule: Rule, shards: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"parameter 'layer.w'.*{message}"):
        merge("layer.w", shards, rule)


@pytest.mark.parametrize(
    ("kind", "shape"), [("column", (3, 2)), ("row", (2, 3)), ("row", (2,)), ("halves", (6, 1)), ("halves", (3, 1))]
)
def test_megatron_rules_what_cannot_be_divided_is_refused_by_name(kind: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"parameter 'layer.w'"):
        split("layer.w", torch.zeros(shape), Rule(kind), 2)


INFO = {
    "universal_checkpoint_version": 0.4,
    "tp_replicated_parameter_patterns": [r".*norm\.weight", r"both"],
    "parameter_to_average_patterns": [r".*avg"],
    "parameter_with_row_parallelism_patterns": [r".*dense\.weight", r"both"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*swiglu"],
    "parameter_with_sub_params": [{"patterns": [r".*qkv"], "shape": ((4, 2, 2), -1), "partition_dim": 0}],
    "sub_param_shard_widths": {r".*qkv": [[2, 2], [1, 1], [1, 1]]},
    "vocabulary_parameter_patterns": [r"embed"],
    "pipeline_replicated_parameter_patterns": [r"tied"],
    "autotp_unsupported_parameter_patterns": {r".*odd": "its layout is not known"},
    "original_vocab_size": 11,
}


def test_rules_are_found_by_pattern() -> None:
    rules = MergeRules.from_info(INFO)
    kinds = {
        name: rules.rule(name).kind for name in ("a.norm.weight", "x.avg", "h.dense.weight", "swiglu", "both", "z")
    }
    assert kinds == {
        "a.norm.weight": "replicated", "x.avg": "average", "h.dense.weight": "row", "swiglu": "halves",
        "both": "replicated", "z": "column",
    }  # fmt: skip
    assert rules.rule("embed.weight") == Rule("column", vocabulary_size=11)
    assert rules.rule("h.qkv").widths == ((2, 2), (1, 1), (1, 1))
    assert rules.held_by_first_stage("tied.weight") and not rules.held_by_first_stage("h.tied")
    assert rules.unused(["a.norm.weight", "x.avg", "h.dense.weight", "swiglu", "h.qkv"]) == ["both", "embed"]
    assert MergeRules.from_info(None).rule("anything") == Rule()


def test_older_information_divides_sub_parameters_evenly() -> None:
    older = {**INFO, "universal_checkpoint_version": 0.3, "sub_param_shard_widths": {}}
    assert MergeRules.from_info(older).rule("h.qkv").widths is None
    with pytest.raises(ValueError, match=r"'h.qkv'.*sub_param_shard_widths has no entry"):
        MergeRules.from_info({**older, "universal_checkpoint_version": 0.4}).rule("h.qkv")


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ({"tp_replicated_parameter_patterns": ["n.*", "no.*"]}, "norm", "several patterns"),
        ({}, "odd", "its layout is not known"),
        ({"original_vocab_size": None}, "embed", "original_vocab_size"),
        ({"parameter_with_sub_params": [{"patterns": []}]}, "x", "needs patterns, shape and partition_dim"),
        ({"parameter_with_sub_params": [{"patterns": [], "shape": [1], "partition_dim": 1}]}, "x", "partition_dim 1"),
    ],
)
def test_rules_that_cannot_be_followed(change: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MergeRules.from_info({**INFO, **change}).rule(name)
