"""Batches of which ranks have some tokens each: what is cut, and the attention function that is told of the rest.

Padding and packed samples are read from whole batches, and travel to the attention function as a small tensor in the
place of a 4-d mask, which models hand on as it is, also to layers that a checkpoint computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero_strategy.sequence import SequenceGroup, Visible, attention

IGNORED = -100
NOT_DIVIDED = "cannot be divided among ranks (mesh.sequence)"
# No mask of zeros and ones begins with it.
_MARK = 7_305_801  # the first number of a message


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise for arguments that cannot be cut."""
    if "input_ids" not in given and "inputs_embeds" not in given:
        raise ValueError(f"sequences that ranks divide: a forward without input_ids or inputs_embeds ({sorted(given)})")
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        found = f"of {mask.dim()} dimensions" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"attention_mask is {found}: only one of (batch, tokens) can be cut; padding, or None")
    for name in ("pixel_values", "input_features", "encoder_hidden_states", "head_mask", "or_mask_function"):
        if given.get(name) is not None:
            raise ValueError(f"{name}: it {NOT_DIVIDED}")
    if given.get("output_attentions"):
        raise ValueError(f"output_attentions=True: it {NOT_DIVIDED}")
    if "cu_seq_lens_q" in given and "position_ids" not in given:
        raise ValueError("cu_seq_lens_q without position_ids: give position_ids that begin anew at each sample")
    logits = given.get("logits_to_keep")
    if logits is not None and not (isinstance(logits, int) and logits == 0):
        raise ValueError("logits_to_keep: ranks have different tokens; leave it out")


def token_dimension(name: str, value: Tensor, batch: int, length: int) -> int | None:
    """Along which dimension a tensor has the tokens of sequences; None: it has none."""
    if name == "position_ids":
        return value.dim() - 1
    if value.dim() >= 2 and value.shape[:2] == (batch, length):
        return 1
    return None


def cut_tokens(value: Tensor, dim: int, padding: int, fill: int, group: SequenceGroup) -> Tensor:
    """This rank's tokens, after so many of padding at the end."""
    if padding:
        shape = list(value.shape)
        shape[dim] = padding
        value = torch.cat([value, value.new_full(shape, fill)], dim=dim)
    return group.split(value, dim)


def shifted_labels(given: Mapping[str, Any], tokenwise: bool) -> Tensor:
    """Labels of the tokens in whose places they are predicted, (batch, tokens)."""
    shifted = given.get("shift_labels")
    if shifted is not None or tokenwise:
        found: Tensor = given["labels"] if shifted is None else shifted
        return found
    return F.pad(given["labels"][:, 1:], (0, 1), value=IGNORED)


def gathered(group: SequenceGroup, part: Any, length: int) -> Any:
    """Outputs of tokens of all ranks, without the padding; None stays None. A collective of the group."""
    if part is None:
        return None
    if isinstance(part, (list, tuple)):
        return type(part)(gathered(group, each, length) for each in part)
    return group.gather(part, dim=1)[:, :length]


# ---- who sees whom ----


def message_of(visible: Visible | None, length: int) -> Tensor:
    """The pairs of queries and keys, as numbers in a tensor of 4 dimensions."""
    numbers = [_MARK, length, -1 if visible is None else len(visible.samples)]
    for sample in () if visible is None else visible.samples:
        numbers.append(len(sample))
        for row, column in sample:
            numbers += [*row, *column]
    return torch.tensor(numbers, dtype=torch.int64).view(1, 1, 1, -1)


def read_message(message: Any) -> tuple[Visible | None, int] | None:
    """The content of a message, and the length of sequences; None: it is something else."""
    if not isinstance(message, Tensor) or message.shape[:3] != (1, 1, 1) or message.is_floating_point():
        return None
    mark, length, count, *rest = message.flatten().tolist()
    if mark != _MARK:
        return None
    if count < 0:
        return None, length
    samples, numbers = [], iter(rest)
    for _ in range(count):
        spans = [tuple(next(numbers) for _ in range(4)) for _ in range(next(numbers))]
        samples.append(tuple(((a, b), (c, d)) for a, b, c, d in spans))
    return Visible(tuple(samples)), length


class AttentionFunction:
    """The attention function of a model's layers.

    Args:
        group: The ranks.
        config: The model's.

    Attributes:
        dtype: Of the output of the last call.
    """

    def __init__(self, group: SequenceGroup, config: Any) -> None:
        self.group, self.dtype = group, torch.float32
        self._windowed = getattr(config, "sliding_window", None) is not None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Attend, as transformers calls it; q, k and v are (batch, heads, tokens here, width).

        Raises:
            ValueError: If a layer wants what cannot be divided; names it.
        """
        name = type(module).__name__
        found = read_message(attention_mask)
        if found is None:
            raise ValueError(
                f"{name}: a forward that no hook has divided, or a mask that the model has made itself; sequences that "
                "ranks divide take attention_mask of (batch, tokens), and no other"
            )
        visible, length = found
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{name}: {query.shape[2]} queries to {key.shape[2]} keys (cross-attention) with sequences"
            )
        if dropout and module.training:
            raise ValueError(f"{name}: dropout {dropout} in attention, which {NOT_DIVIDED}; set it to 0 in the config")
        for what in ("softcap", "s_aux", "position_bias", "head_mask", "cache"):
            if keywords.get(what) is not None:
                raise ValueError(f"{name}: attention with {what}, which {NOT_DIVIDED}")
        window = keywords.get("sliding_window")
        if self._windowed and "sliding_window" not in keywords:
            raise ValueError(f"{name}: config.sliding_window, which its layers do not tell the attention function")
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        # It hides no token.
        if window is not None and window >= length:
            window = None
        out = attention(
            query, key, value, self.group, causal=causal, scale=scaling, visible=visible, window=window
        )  # fmt: skip
        self.dtype = out.dtype
        return out.transpose(1, 2).contiguous(), None


# ---- loaders that cut ----


def cut_batches(loader: Any, group: Callable[[], SequenceGroup]) -> None:
    """Let a prepared loader give each rank its tokens, as Accelerate's where a `ParallelismConfig` has `sp_size`.

    Batches get `position_ids`, and `shift_labels` in the place of `labels`.

    Args:
        loader: Accelerate's, of whole batches.
        group: Gives the ranks, once there is a model.
    """
    inner = loader.base_dataloader
    # By its collation, which is all that a loader made of this one takes along (`skip_first_batches`).
    if not isinstance(inner.collate_fn, CutCollation):
        inner.collate_fn = CutCollation(inner.collate_fn, group)


class CutCollation:
    """Makes a batch of samples, and this rank's tokens of it.

    Args:
        collate: Makes whole batches.
        group: Gives the ranks, once there is a model.
    """

    def __init__(self, collate: Callable[[Any], Any], group: Callable[[], SequenceGroup]) -> None:
        self._collate, self._group = collate, group

    def __call__(self, samples: Any) -> dict[str, Any]:
        return cut_batch(self._collate(samples), self._group())

    def __reduce__(self) -> tuple[type[CutCollation], tuple[Any, Callable[[], SequenceGroup]]]:
        # A worker that is spawned, not forked, has no engines to ask.
        return CutCollation, (self._collate, partial(_same, self._group()))


def _same(group: SequenceGroup) -> SequenceGroup:
    return group


def cut_batch(batch: Any, group: SequenceGroup) -> dict[str, Any]:
    """This rank's tokens of a batch: labels are shifted before, and lengths padded to what can be divided.

    Raises:
        ValueError: If the batch is no mapping with `input_ids`, or has padding before tokens.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise ValueError(f"batches that a loader cuts are mappings with input_ids, and this one is a {type(batch)}")
    found, tokens = dict(batch), batch["input_ids"]
    rows, length = tokens.shape
    mask = found.pop("attention_mask", None)
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(
            "attention_mask: padding before tokens; pad at the end, or give position_ids of packed samples"
        )
    # Packed samples bring positions that begin anew.
    found.setdefault("position_ids", torch.arange(length, device=tokens.device).expand(rows, -1))
    labels = found.pop("labels", None)
    if labels is not None:
        found.setdefault("shift_labels", F.pad(labels[:, 1:], (0, 1), value=IGNORED))
    padding = -length % group.parts
    for name, value in found.items():
        if isinstance(value, Tensor) and (dim := token_dimension(name, value, rows, length)) is not None:
            found[name] = cut_tokens(value, dim, padding, IGNORED if name == "shift_labels" else 0, group)
    return found
