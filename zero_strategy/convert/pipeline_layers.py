"""Reads DeepSpeed checkpoints of several model-parallel ranks: pipelines, tensor parallelism, both.

    layer_{layer:02d}[-model_{tp:02d}]-model_states.pt    a pipeline's weights, under names local to the layer
    mp_rank_{pp * tp_degree + tp:02d}_model_states.pt     everything else; without pipelines the weights, too
    [bf16_]zero_pp_rank_*_mp_rank_..._optim_states.pt     optimizer state of one such rank

A pipeline's parameters are called `{layer}.{local name}`, as `PipelineModule` itself calls them; those of a tied layer
`tied_modules.{key}.{local name}`. The layer file of a tied layer does not tell its key: it is the one whose parameters
have the file's names and shapes, and where several have, the same values. `{layer}.{local name}` is then an alias.

How tensor-parallel shards are joined is told by `universal_checkpoint_info`. Checkpoints of Megatron-DeepSpeed's GPT
from before that entry are recognised by their names; for others the rules must be given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from zero_strategy.convert.deepspeed import (
    Degrees,
    merge_stages,
    merge_tensor_ranks,
    read_model_files,
    read_optimizer_files,
    stage_of,
)
from zero_strategy.convert.deepspeed_model import (
    CheckpointFiles,
    MasterState,
    ModelFiles,
    assemble,
    plain,
    with_training_state,
)
from zero_strategy.convert.megatron import MergeRules
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import PortableState, StoredTensor

_TIED = "tied_modules"
_MARK = "self_attention.query_key_value.weight"
MEGATRON_GPT = MergeRules(
    patterns={
        "row": (r".*(self_attention\.dense|mlp\.dense_4h_to_h)\.weight$",),
        "replicated": (
            r".*(layernorm|layer_norm|norm_f|word_embeddings_norm)\.(weight|bias)$",
            r".*(self_attention\.dense|mlp\.dense_4h_to_h)\.bias$",
            r".*position_embeddings\.weight$",
            r"\d+\.(weight|bias)$",  # a layer that is nothing but a norm
        ),
    }
)
"""Megatron-DeepSpeed's GPT; its vocabulary keeps the rows that pad it."""


def read(
    path: Path, *, optimizer: bool = True, rules: MergeRules | None = None, allow: Mapping[str, None] | None = None
) -> PortableState:
    """The whole state of all model-parallel ranks.

    Args:
        path: The directory of one tag.
        optimizer: Read masters, moments and hyper-parameters, too.
        rules: How tensor-parallel shards are joined, where the checkpoint does not tell or is to be overruled.
        allow: Further class names to read as inert records.

    Raises:
        ValueError: Naming the file, rank, layer or parameter that is missing, damaged or contradicted, and where shards
            cannot be joined without rules.
    """
    return _Ranks(CheckpointFiles.find(path), allow, optimizer, rules).whole()


class _Ranks:
    def __init__(
        self, files: CheckpointFiles, allow: Mapping[str, None] | None, optimizer: bool, rules: MergeRules | None
    ) -> None:
        self.files = files
        self.allow = allow
        self.models = {number: read_model_files(rank, allow) for number, rank in sorted(files.ranks.items())}
        self.degrees = self._degrees()
        self.layers = self._layers()
        self.rules = self._rules(rules)
        first = self.models[0]
        self.stage = stage_of(files.ranks[0], first)
        self.masters: dict[int, MasterState | None] = {}
        for number, model in self.models.items():
            wanted = optimizer or self.stage == 3
            read = read_optimizer_files(files.ranks[number], model, moments=optimizer, allow=allow) if wanted else None
            self.masters[number] = read
        self.optimizer = optimizer
        grid = [(pp, tp) for pp in range(self.degrees.pp) for tp in range(self.degrees.tp)]
        self.tied = {position: self._tied(*position) for position in grid if files.layers}
        self.owner = {layer: self._owner(layer) for layer in self.layers[0]}

    def whole(self) -> PortableState:
        stages = []
        for pp in range(self.degrees.pp):
            states = [self._state(pp, tp) for tp in range(self.degrees.tp)]
            buffers = [name for model in self.models.values() for name in model.first.get("buffer_names") or ()]
            stages.append(merge_tensor_ranks(states, self.rules, copies=buffers))
        state = merge_stages(stages, self.rules)
        found = {"pp": self.degrees.pp, "tp": self.degrees.tp}
        info = plain(self.models[0].first.get("universal_checkpoint_info") or {})
        state.user["deepspeed"] = {**state.user.get("deepspeed", {}), **found, "universal_checkpoint_info": info}
        if not self.optimizer:
            state.optimizers, state.loss_scaler = [], None
        return state

    # ---- the grid ----

    def _degrees(self) -> Degrees:
        if 0 not in self.models:
            raise ValueError(f"{self.files.directory}: the model states of model-parallel rank 0 are missing")
        recorded = self.models[0].first.get("checkpoint_parallel_dimensions")
        if isinstance(recorded, dict) and type(recorded.get("tp_degree")) is int:
            degrees = Degrees(int(recorded.get("pp_degree") or 1), recorded["tp_degree"])
        elif self.files.layers:
            tp = 1 + max(tp for _, tp in self.files.layers)
            degrees = Degrees(max(1, len(self.models) // tp), tp)
        else:
            degrees = Degrees(1, len(self.models))
        if differing := sorted(set(range(degrees.pp * degrees.tp)) ^ self.models.keys()):
            raise ValueError(
                f"{self.files.directory}: was saved with pp {degrees.pp} and tp {degrees.tp}; model-parallel rank(s) "
                f"{differing} are missing or too many"
            )
        return degrees

    def _rules(self, given: MergeRules | None) -> MergeRules:
        if given is not None or self.degrees.tp == 1:
            return given or MergeRules()
        info = self.models[0].first.get("universal_checkpoint_info")
        if info:
            return MergeRules.from_info(info)
        if any(name.endswith(_MARK) for named in self.layers[0].values() for name in named):
            return MEGATRON_GPT
        raise ValueError(
            f"{self.files.directory}: has {self.degrees.tp} tensor-parallel ranks, but no universal_checkpoint_info, "
            "which tells how to join them; pass rules=MergeRules(...)"
        )

    # ---- one rank ----

    def _state(self, pp: int, tp: int) -> PortableState:
        number = pp * self.degrees.tp + tp
        model, masters = self.models[number], self.masters[number]
        if not self.files.layers:
            return assemble(model, masters, stage=self.stage)
        tied = self.tied[pp, tp]
        state = PortableState()
        for layer, named in self.layers[tp].items():
            if self.owner[layer] != pp:
                continue
            for local, tensor in named.items():
                plain = f"{layer}.{local}"
                name = f"{_TIED}.{tied[layer]}.{local}" if layer in tied else plain
                state.weights[name] = StoredTensor.of(name, tensor)
                if name != plain:
                    state.aliases[plain] = name
        self._add_tied_of_earlier_stages(state, pp, tp)
        return with_training_state(state, model, masters, stage=self.stage)

    def _layers(self) -> list[dict[int, dict[str, torch.Tensor]]]:
        """Tensor-parallel rank -> layer -> local name -> tensor."""
        layers: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in range(self.degrees.tp)]
        for (layer, tp), path in sorted(self.files.layers.items()):
            if tp >= self.degrees.tp:
                raise ValueError(f"{path}: is of tensor-parallel rank {tp}, but {self.degrees.tp} saved")
            content = load_restricted(path, allow=self.allow, verify=False)
            if not isinstance(content, dict):
                raise ValueError(f"{path}: holds a {type(content).__name__}, not a layer's state dict")
            layers[tp][layer] = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
        for tp, named in enumerate(layers):
            if gaps := sorted(layers[0].keys() ^ named.keys()):
                raise ValueError(
                    f"{self.files.directory}: tensor-parallel ranks 0 and {tp} do not have the same layer files: {gaps}"
                )
        return layers

    # ---- which stage a layer is on, and which are tied ----

    def _names(self, pp: int, tp: int = 0) -> dict[str, tuple[int, ...]]:
        return _trained(self.models[pp * self.degrees.tp + tp])

    def _owner(self, layer: int) -> int:
        """The stage whose optimizer has the layer's parameters; a layer without any is with the one before it."""
        for earlier in sorted((other for other in self.layers[0] if other <= layer), reverse=True):
            for pp in range(self.degrees.pp):
                if earlier in self.tied[pp, 0] or any(
                    f"{earlier}.{local}" in self._names(pp) for local in self.layers[0][earlier]
                ):
                    return pp
        return 0

    def _tied(self, pp: int, tp: int) -> dict[int, str]:
        """Layer -> key, of the tied layers that have their file from this stage."""
        names, found = self._names(pp, tp), {}
        everywhere = {name for stage in range(self.degrees.pp) for name in self._names(stage, tp)}
        for key in _keys(names):
            if any(key in _keys(self._names(earlier, tp)) for earlier in range(pp)):
                continue  # the first stage that has it writes it
            wanted = {name.removeprefix(f"{_TIED}.{key}."): shape for name, shape in names.items() if _is_of(name, key)}
            fitting = [
                layer
                for layer, named in self.layers[tp].items()
                if layer not in found
                and not any(f"{layer}.{local}" in everywhere for local in named)
                and all(local in named and tuple(named[local].shape) == shape for local, shape in wanted.items())
            ]
            if len(fitting) > 1:
                fitting = [layer for layer in fitting if self._has_values(pp, tp, key, self.layers[tp][layer])]
            if not fitting:
                raise ValueError(
                    f"{self.files.directory}: no layer file has the parameters of tied layer {key!r}: {sorted(wanted)}"
                )
            found[fitting[0]] = key
        return found

    def _has_values(self, pp: int, tp: int, key: str, named: Mapping[str, torch.Tensor]) -> bool:
        masters = self.masters[pp * self.degrees.tp + tp]
        if masters is None:
            raise ValueError(
                f"{self.files.directory}: several layer files may be of tied layer {key!r}; read the optimizer, too"
            )
        mine = {local: masters.fp32[name] for local in named if (name := f"{_TIED}.{key}.{local}") in masters.fp32}
        return all(torch.equal(stored.load().to(named[local].dtype), named[local]) for local, stored in mine.items())

    def _add_tied_of_earlier_stages(self, state: PortableState, pp: int, tp: int) -> None:
        """A later stage's optimizer has its own copy of a tied parameter, whose weights are in the first one's file."""
        for name in self._names(pp, tp):
            if name in state.weights or not name.startswith(f"{_TIED}."):
                continue
            for earlier in range(pp):
                for layer, key in self.tied[earlier, tp].items():
                    if _is_of(name, key):
                        tensor = self.layers[tp][layer][name.removeprefix(f"{_TIED}.{key}.")]
                        state.weights[name] = StoredTensor.of(name, tensor)


def _trained(model: ModelFiles) -> dict[str, tuple[int, ...]]:
    tables: Iterable[Mapping[str, Any]] = model.first.get("param_shapes") or ()
    return {name: tuple(shape) for table in tables for name, shape in table.items()}


def _keys(names: Iterable[str]) -> list[str]:
    found = (re.match(rf"{_TIED}\.([^.]+)\.", name) for name in names)
    return list(dict.fromkeys(match[1] for match in found if match))


def _is_of(name: str, key: str) -> bool:
    return name.startswith(f"{_TIED}.{key}.")
