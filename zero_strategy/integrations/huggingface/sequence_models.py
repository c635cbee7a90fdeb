"""Hugging Face models whose sequences ranks divide: the model is called with whole batches, and computes its part.

    batch, the same on all ranks of a group            a hook before the model's forward
      input_ids, labels, position_ids, mask      ->      this rank's tokens; labels shifted first
    layers                                               token by token, as they are
    attention                                    ->      `zero_strategy.sequence.attention`, a registered function
    loss                                         ->      sum of this rank's tokens / tokens of the group, added up

Attention functions of transformers are registered by name, and its loss function is a property with a setter; nothing
of a model's code is replaced.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.dtensor import tensor_ranks
from zero_strategy.integrations.huggingface.sequence_batches import (
    IGNORED,
    NOT_DIVIDED,
    AttentionFunction,
    check_arguments,
    cut_tokens,
    message_of,
    shifted_labels,
    token_dimension,
)
from zero_strategy.integrations.huggingface.tensor_models import hugging_face_models
from zero_strategy.sequence import SequenceGroup, Visible
from zero_strategy.sequence.attention import heads_divide
from zero_strategy.sequence.tiling import TiledForward, TiledHead, tile_modules, tileable_modules

_LOSSES = ("ForCausalLM", "LMHeadModel")
_TOKENWISE = ("ForMaskedLM", "ForTokenClassification")
_LAYERS = {"full_attention", "sliding_attention", "attention", "dense", "sparse"}
_COMPARED_CALLS = 4


def divide_sequences(engine: ZeroEngine) -> list[SequenceModel]:
    """Let the Hugging Face models of an engine's module compute this rank's tokens of every sequence, tile by tile.

    Integrations call it; in a loop of your own, call it after `ZeroEngine(model, ...)`.

    Returns:
        What divides each of them; empty where neither `mesh.sequence` nor `activation_checkpointing.tile_tokens` asks
        for it, or the module has none.

    Raises:
        ValueError: For a model that cannot compute tokens one by one, or an attention that cannot be divided; names it.
    """
    tokens = engine.config.config.activation_checkpointing.tile_tokens
    asked = engine.sequence.size > 1 or tokens > 0
    if not asked:
        return []
    found = hugging_face_models(engine.module)
    if engine.sequence.size == 1 and engine.config.config.activation_checkpointing.is_derived("tile_tokens"):
        found = [each for each in found if _is_tileable(each[1])]  # chosen, and perhaps for another model
    # All are looked at before the first is changed.
    for outer, model in found:
        if engine.sequence.size > 1:
            check_divisible(outer, model)
        if tokens:
            check_tileable(model)
    if found and engine.sequence.size > 1:
        engine.sequence = _group_for([model for _, model in found], engine)
    divided = []
    for outer, model in found:
        divided.append(SequenceModel(outer, model, engine.sequence, tokens))
        engine.when_plain(divided[-1].undo)
    return divided


def tiles_of(module: nn.Module) -> Callable[[int], AbstractContextManager[None]] | None:
    """A context in which a module's Hugging Face models compute so many tokens at a time; None: none of them can.

    For a run without memory, before there is an engine: `divide_sequences` does it for a training.
    """
    found = [each for each in hugging_face_models(module) if _is_tileable(each[1])]
    return partial(_tiled, found) if found else None


@contextmanager
def _tiled(found: list[tuple[nn.Module, Any]], tokens: int) -> Iterator[None]:
    alone = SequenceGroup(None)
    models = [SequenceModel(outer, model, alone, tokens) for outer, model in found]
    try:
        yield
    finally:
        for model in models:
            model.undo()


class SequenceModel:
    """Cuts the batches of a model, gives its layers their attention, and adds up its losses.

    Args:
        outer: The module that is called.
        model: The `PreTrainedModel` in it.
        group: The ranks.
        tile: Tokens of MLPs and of the loss at a time; 0: all. See `check_tileable`.

    Attributes:
        cut_already: Batches come from a loader that has cut them, with `position_ids` and `shift_labels`.
        loss_only: Without gradients, too, nobody wants logits.
        plain_loss: The loss function that the model had.
    """

    def __init__(self, outer: nn.Module, model: Any, group: SequenceGroup, tile: int = 0) -> None:
        self.group, self.divided = group, group.size > 1
        self._model, self._weight = weakref.ref(model), float(self.group.size)
        self._labels: Tensor | None = None
        self._items: Tensor | int | None = None
        self._outer, self._probed, self._compared = weakref.ref(outer), False, 0
        self.cut_already = self.loss_only = self._tiling = False
        self._signature = inspect.signature(outer.forward)
        self._tokenwise = type(model).__name__.endswith(_TOKENWISE)
        # Registered for the whole process, so that each model needs a name of its own.
        self.name, self._before = f"zero_sequence_{id(self):x}", model.config._attn_implementation
        self.plain_loss = model.loss_function
        self._attend = AttentionFunction(self.group, model.config)
        self._head = _tile(model, tile) if tile else None
        if self.divided:
            from transformers import AttentionInterface

            AttentionInterface.register(self.name, self._attend)
            model.set_attn_implementation(self.name)
        model.loss_function = _Loss(self)
        # The second after an exception, too, so that no labels stay behind.
        self._hooks = [
            outer.register_forward_pre_hook(_Cut(self), with_kwargs=True, prepend=True),
            outer.register_forward_hook(_Finish(self), with_kwargs=True, always_call=True),
        ]

    def undo(self) -> None:
        """Let the model be as it was: its own loss, attention and forwards."""
        self._whole(True)
        for hook in self._hooks:
            hook.remove()
        if (model := self._model()) is None:
            return
        model.loss_function = self.plain_loss
        for part in model.modules():
            if isinstance(forward := vars(part).get("forward"), (TiledForward, TiledHead)):
                forward.undo()

    # ---- before the forward ----

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a forward, with this rank's tokens.

        Raises:
            ValueError: If an argument cannot be cut; names it.
        """
        bound = self._signature.bind_partial(*args, **kwargs)
        given: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                given.update(value)
            else:
                given[name] = value
        given = {name: value for name, value in given.items() if value is not None}
        self._forget()
        labelled = "labels" in given or "shift_labels" in given
        used = labelled or torch.is_grad_enabled() or self.cut_already
        if given.get("past_key_values") is not None or not used:
            self._whole(True)  # `generate`, and scores of whole sequences: as one process
            return args, kwargs
        if not self.divided:
            if labelled and self._wants_tiles:
                self._expect(shifted_labels(given, False))
            return args, kwargs
        self._whole(False)
        check_arguments(given)
        whole = self._assembled(given) if self.cut_already and not self._probed else given
        if not self.cut_already:
            self._compare(given)
        if not self._probed:
            self._probe(whole)
        return (), self._taken(given) if self.cut_already else self._divided(given)

    @property
    def _wants_tiles(self) -> bool:
        return self._head is not None and (self.loss_only or torch.is_grad_enabled())

    def _forget(self) -> None:
        self._labels, self._items, self._tiling = None, None, False
        if self._head is not None:
            self._head.forget()

    def _expect(self, labels: Tensor, items: Tensor | int | None = None) -> None:
        """The loss is that of these labels of this rank; `items`: tokens of the group that count."""
        self._labels = labels
        self._items = (labels != IGNORED).sum() if items is None else items
        self._tiling = self._wants_tiles
        if self._tiling:
            assert self._head is not None
            self._head.expect(labels)

    def _whole(self, whole: bool) -> None:
        if not self.divided:
            return
        model = self._model()
        wanted = self._before if whole else self.name
        if model is not None and model.config._attn_implementation != wanted:
            model.set_attn_implementation(wanted)

    def _divided(self, given: dict[str, Any]) -> dict[str, Any]:
        tokens = given["inputs_embeds"] if "inputs_embeds" in given else given["input_ids"]
        batch, length = tokens.shape[:2]
        mask, places = given.pop("attention_mask", None), given.get("position_ids")
        visible = None
        if mask is not None:
            visible = Visible.padding(mask)
        elif places is not None:
            visible = Visible.positions(places[0] if places.dim() == 3 else places)
        if places is None:
            given["position_ids"] = self._places(tokens)
        elif places.shape[-2] == 1 != batch:
            given["position_ids"] = places.expand(*places.shape[:-2], batch, length)
        labelled = "labels" in given or "shift_labels" in given
        shifted = shifted_labels(given, self._tokenwise) if labelled else None
        for name in ("labels", "shift_labels"):
            given.pop(name, None)
        padding = -length % self.group.parts
        if padding and visible is None:
            visible = Visible(((((0, length), (0, length)),),))
        for name, value in given.items():
            if isinstance(value, Tensor) and (dim := token_dimension(name, value, batch, length)) is not None:
                given[name] = cut_tokens(value, dim, padding, 0, self.group)
        given["attention_mask"] = message_of(visible, length + padding)
        if shifted is not None:
            given["labels"] = cut_tokens(shifted, 1, padding, IGNORED, self.group)
            self._expect(given["labels"], (shifted != IGNORED).sum())
        return self._without_cache(given)

    def _places(self, tokens: Tensor) -> Tensor:
        """Positions that the model would give tokens: from 0 on, or after those of padding (RoBERTa and its kin)."""
        model, (batch, length) = self._model(), tokens.shape[:2]
        for child in () if model is None or tokens.dim() > 2 else model.modules():
            own = getattr(child, "create_position_ids_from_input_ids", None)
            if own is not None and getattr(child, "padding_idx", None) is not None:
                found: Tensor = own(tokens, child.padding_idx)
                return found
        return torch.arange(length, device=tokens.device).expand(batch, -1)

    def _probe(self, given: dict[str, Any]) -> None:
        """Compare a few tokens, divided and whole, before the first of them count.

        Raises:
            ValueError: If they differ: layers see other tokens otherwise than by attention, or positions are counted
                in a way of their own.
        """
        # First: the calls below come here again.
        self._probed = True
        model, outer = self._model(), self._outer()
        assert model is not None and outer is not None
        tokens = given["inputs_embeds"] if "inputs_embeds" in given else given["input_ids"]
        batch, length = tokens.shape[:2]
        few = min(length, max(32, 4 * self.group.parts))
        part = {
            name: value.narrow(dim, 0, few)
            for name, value in given.items()
            if isinstance(value, Tensor) and (dim := token_dimension(name, value, batch, length)) is not None
        }
        # Without labels and gradients a call is computed whole.
        labels = part.pop("labels", part.pop("shift_labels", None))
        labels = torch.zeros(batch, few, dtype=torch.int64, device=tokens.device) if labels is None else labels
        training = [module for module in outer.modules() if module.training]
        before = self.loss_only, self.cut_already
        outer.eval()
        self.loss_only = self.cut_already = False
        try:
            with torch.no_grad():
                # With a cache transformers does not tell packed samples apart.
                whole = _tokens_of(outer(**self._without_cache(dict(part)), return_dict=True))
                # Last, as it leaves the model with the attention of the forward that follows.
                divided = _tokens_of(outer(**part, labels=labels, return_dict=True))
        finally:
            self.loss_only, self.cut_already = before
            for module in training:
                module.training = True
        padding = -few % self.group.parts
        wanted = cut_tokens(whole, 1, padding, 0, self.group)
        here = self.group.positions(few + padding) < few
        # Nobody uses what is computed for padding, which may differ.
        if "attention_mask" in part:
            seen = cut_tokens(part["attention_mask"] != 0, 1, padding, 0, self.group)
            here = here & seen.all(dim=0).cpu()
        gap = (divided - wanted)[:, here.to(divided.device)].float().abs().max() if bool(here.any()) else 0.0
        largest = float(wanted.float().abs().max())
        # Under autocast logits may be wide, but not what they are computed from.
        wide = all(dtype in (torch.float32, torch.float64) for dtype in (wanted.dtype, self._attend.dtype))
        bound = (1e-3 if wide else 0.1) * largest
        # A rank that raised alone would leave the others in their next exchange.
        gaps = self.group.ranks.all_gather_objects(float(gap) / max(bound, 1e-30), "comparison")
        if not all(each <= 1 for each in gaps):  # a NaN is not
            raise ValueError(
                f"mesh.sequence: {type(model).__name__} computes other outputs where ranks divide its sequences (by "
                f"{max(gaps) * bound / largest:.2g} of the largest, among the first {few} tokens): some layer sees "
                "other tokens otherwise than by attention, or counts positions in a way of its own (give position_ids)"
            )

    def _assembled(self, given: dict[str, Any]) -> dict[str, Any]:
        """Whole sequences of arguments that were cut by a loader.

        Raises:
            ValueError: If they were not.
        """
        if self._tokenwise:
            raise ValueError(
                "ParallelismConfig(sp_size=...) is for causal language models; take cp_size, or mesh.sequence"
            )
        if "position_ids" not in given:
            raise ValueError(
                "ParallelismConfig(sp_size=...): a forward without the position_ids that prepared loaders give batches"
            )
        batch, length = given["position_ids"].shape
        return {
            name: self.group.gather(value, dim)
            for name, value in given.items()
            if isinstance(value, Tensor) and (dim := token_dimension(name, value, batch, length)) is not None
        }

    def _taken(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments that were cut by a loader, and what attention needs besides."""
        labels = given.pop("shift_labels", None)
        for name in ("labels", "attention_mask"):
            given.pop(name, None)
        whole = self.group.gather(given["position_ids"], dim=-1)
        given["attention_mask"] = message_of(Visible.positions(whole), whole.shape[-1])
        if labels is not None:
            counts = self.group.ranks.all_gather_small((labels != IGNORED).sum().view(1), "tokens that count")
            given["labels"] = labels
            self._expect(labels, int(torch.stack(counts).sum()))
        return self._without_cache(given)

    def _without_cache(self, given: dict[str, Any]) -> dict[str, Any]:
        kinds = {one.kind for one in self._signature.parameters.values()}
        if "use_cache" in self._signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds:
            given["use_cache"] = False
        return given

    def _compare(self, given: Mapping[str, Any]) -> None:
        """Raise unless all ranks of the group were given the same batch; looked at in the first calls."""
        if self._compared >= _COMPARED_CALLS:
            return
        self._compared += 1
        tokens = given["inputs_embeds"] if "inputs_embeds" in given else given["input_ids"]
        shape = [*tokens.shape, 0][:3]
        mine = torch.tensor([*shape, float(tokens.detach().double().sum())], dtype=torch.float64)
        everyone = self.group.ranks.all_gather_objects(mine.tolist(), "batches")
        if any(other != everyone[0] for other in everyone):
            shapes = [tuple(int(n) for n in other[:2]) for other in everyone]
            raise ValueError(
                f"the {self.group.size} ranks that divide sequences were given different batches, of shapes {shapes}: "
                "give them the same samples, by a prepared loader or DistributedSampler(data, "
                "**engine.sampler_arguments), and shuffle by the same seed"
            )

    # ---- the loss ----

    def loss(self, logits: Tensor, labels: Any = None, *rest: Any, **keywords: Any) -> Tensor:
        """The loss function of the model: over the tokens of all ranks of the group."""
        if self._labels is None:
            found: Tensor = self.plain_loss(logits, labels, *rest, **keywords)
            return found
        # By this `finish` knows that the model has called its loss function.
        own_labels, self._labels = self._labels, None
        if self._tiling:
            assert self._head is not None
            items = keywords.get("num_items_in_batch")
            items = self._items if items is None else items
            assert items is not None
            return sum_over(self._head.take(logits) / items, self.group, self._weight)
        if keywords.get("num_items_in_batch") is None:
            keywords["num_items_in_batch"] = self._items
        keywords.pop("shift_labels", None)
        if not self._tokenwise:
            keywords["shift_labels"] = own_labels
        part: Tensor = self.plain_loss(logits, own_labels, *rest, **keywords)
        return sum_over(part, self.group, self._weight)

    def finish(self, outputs: Any) -> Any:
        """The outputs of a forward, with the loss.

        Raises:
            ValueError: If the model computed its loss without its loss function.
        """
        labels, tiling = self._labels, self._tiling
        items = self._items
        self._forget()
        if tiling and labels is None and outputs is not None:  # states stand where logits would be
            if not isinstance(outputs, dict):
                return (outputs[0], *outputs[2:])
            return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})
        if labels is None or outputs is None:
            return outputs
        if not self._tokenwise:
            model = self._model()
            raise ValueError(
                f"{type(model).__name__}.forward computes a loss without its loss_function, of this rank's tokens "
                "only: compute the loss from its logits, by engine.token_mean, or leave mesh.sequence at 1, and "
                "activation_checkpointing.tile_tokens out"
            )
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[1]
        total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        assert items is not None
        loss = sum_over(total / items, self.group, self._weight)
        if isinstance(outputs, dict):
            outputs["loss"] = loss
            return outputs
        return (loss, *outputs[1:])


class _Part:
    """A hook or function of a `SequenceModel`; a copy of the model is not divided."""

    def __init__(self, owner: SequenceModel | None) -> None:
        self.owner = owner

    def __deepcopy__(self, memo: Any) -> _Part:
        return type(self)(None)

    def __reduce__(self) -> tuple[type[_Part], tuple[None]]:
        return type(self), (None,)


class _Cut(_Part):
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return None if self.owner is None else self.owner.cut(args, kwargs)


class _Finish(_Part):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        return None if self.owner is None else self.owner.finish(outputs)


class _Loss(_Part):
    def __deepcopy__(self, memo: Any) -> Any:
        """Give a copy of a tiled model the loss that the model had."""
        if self.owner is None or self.owner.divided:
            return _Loss(None)
        return self.owner.plain_loss

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.owner is None:
            raise RuntimeError(
                "this is a copy of a model whose sequences ranks divide: give it an attention and a loss of its own, "
                'model.set_attn_implementation("sdpa") and del model._loss_function'
            )
        return self.owner.loss(*args, **kwargs)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: SequenceGroup, weight: float) -> Tensor:
        ctx.weight = weight
        # All ranks add the same numbers in one order, bit by bit.
        everyone = part.new_zeros(group.size)
        everyone[group.rank] = part.detach()
        group.ranks.all_gather(everyone, of="losses").wait()
        return everyone.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.weight, None, None


def sum_over(part: Tensor, group: SequenceGroup, weight: float) -> Tensor:
    """The sum over the ranks of a group; a gradient of it is `weight` times that of this rank's part.

    An engine takes the mean of gradients over all ranks: with the number of ranks as weight, the sum of the group's.
    """
    found: Tensor = _SumOver.apply(part, group, weight)
    return found


# ---- what cannot be divided ----


def _group_for(models: list[Any], engine: ZeroEngine) -> SequenceGroup:
    """The ranks, with as many of them for Ulysses as the heads of all models allow, where the setting is not given."""
    heads, tensor = list[tuple[str, int, int]](), engine.mesh.tensor.size
    for model in models:
        config = model.config.get_text_config()
        count: int = config.num_attention_heads
        key_heads: int = getattr(config, "num_key_value_heads", None) or count
        heads.append((type(model).__name__, count // tensor, key_heads // tensor))
    settings, size = engine.config.config, engine.sequence.size

    def misfits(ulysses: int) -> list[tuple[str, int, int]]:
        return [each for each in heads if not heads_divide(each[1], each[2], ulysses)]

    if settings.origin_of("mesh.ulysses").startswith("derived"):
        best = max(n for n in range(1, size + 1) if size % n == 0 and not misfits(n))
        return SequenceGroup(engine.sequence.ranks, best)
    ulysses = engine.sequence.ulysses
    for name, count, key_heads in misfits(ulysses):
        raise ValueError(
            f"mesh.ulysses is {ulysses} [{settings.origin_of('mesh.ulysses')}]: it does not divide the {count} heads "
            f"({key_heads} of keys and values) that a rank has of {name}; leave it out, for a ring of the other ranks"
        )
    return engine.sequence


def check_divisible(outer: nn.Module, model: Any) -> None:
    """Raise for a model that is not computed token by token, but for an attention that can be divided.

    Raises:
        ValueError: Naming what it has.
    """
    name, config = type(model).__name__, model.config.get_text_config()

    def refuse(what: str) -> None:
        raise ValueError(f"mesh.sequence: {name} has {what}, which {NOT_DIVIDED}")

    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"mesh.sequence: {name} does not take its attention from transformers' attention interface, so ranks "
            "cannot divide its sequences; use a model that does, or mesh.tensor"
        )
    if getattr(config, "is_encoder_decoder", False):
        refuse("an encoder and a decoder")
    if not name.endswith((*_LOSSES, *_TOKENWISE, "Model")) or getattr(model, "pooler", None) is not None:
        refuse("a head that takes some tokens of a sequence (only language models and token classifiers do not)")
    for key in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout"):
        if getattr(config, key, 0.0):
            raise ValueError(
                f"mesh.sequence: {name} has config.{key}={getattr(config, key)}, and dropout in attention "
                f"{NOT_DIVIDED}; set config.{key} = 0.0 before the model is made"
            )
    for key in ("attn_logit_softcapping", "attention_chunk_size", "output_router_logits", "output_attentions"):
        if getattr(config, key, None):
            refuse(f"config.{key}={getattr(config, key)}")
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS):
        refuse(f"layers of the kind {', '.join(other)}")
    for path, child in model.named_modules():
        if isinstance(child, (nn.Conv1d, nn.RNNBase)):
            refuse(f"{path} ({type(child).__name__})")
    if any(config.is_prompt_learning for config in getattr(outer, "peft_config", {}).values()):
        refuse("prompt learning")


def _tile(model: Any, tokens: int) -> TiledHead:
    """Tile the MLPs of a causal language model, and its head."""
    tile_modules(model, tokens)
    return TiledHead(model.get_output_embeddings(), tokens)


def _is_tileable(model: Any) -> bool:
    try:
        check_tileable(model)
    except ValueError:
        return False
    return True


def check_tileable(model: Any) -> None:
    """Raise for a model whose MLPs and loss cannot be tiled; nothing of it is changed.

    Raises:
        ValueError: Naming the model, and what it lacks.
    """
    name = f"activation_checkpointing.tile_tokens: {type(model).__name__}"
    if not type(model).__name__.endswith(_LOSSES):
        raise ValueError(f"{name} is no causal language model, of which alone MLPs and the loss are tiled")
    if tensor_ranks(model) is not None:
        raise ValueError(f"{name} is divided by mesh.tensor, so that no rank has its logits; leave one of the two out")
    if not tileable_modules(model):
        raise ValueError(f"{name} has no modules called mlp or feed_forward")
    head, loss = model.get_output_embeddings(), getattr(model.loss_function, "__name__", "another")
    if type(head) is not nn.Linear or loss != "ForCausalLMLoss":
        raise ValueError(
            f"{name}: tiles of the loss need a Linear as head, and ForCausalLMLoss; they are {head}, {loss}"
        )


def _tokens_of(outputs: Any) -> Tensor:
    """Logits, or states, (batch, tokens, width)."""
    found: Tensor = outputs["logits"] if "logits" in outputs else outputs["last_hidden_state"]
    return found
