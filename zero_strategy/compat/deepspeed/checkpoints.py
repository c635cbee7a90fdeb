"""DeepSpeed's classes for its checkpoints, for any smaller grid of ranks, and its command that makes them universal.

Names, arguments and results are DeepSpeed's. Files are found by parsing their names and read by the restricted
unpickler; where DeepSpeed asserts, ValueError says what is missing.

The command that makes a checkpoint universal,

    python -m zero_strategy.compat.deepspeed.checkpoint.ds_to_universal \
        --input_folder ROOT/TAG --output_folder ROOT/TAG_universal

has DeepSpeed's options. Everything is read and written tensor by tensor in one process, so that there is no temporary
folder; the result loads at stages 1, 2 and 3, whichever the input had.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zero_strategy.compat.deepspeed.grids import (
    meg_2d_parallel_map,
    merge_state,
    model_3d_desc,
    reshape_meg_2d_parallel,
)
from zero_strategy.convert.deepspeed import DeepSpeedDirectory, parts
from zero_strategy.convert.megatron import Rule, merge

EMBEDDING_LAYER_INDEX = 0
FINAL_LAYER_NORM_INDEX = -1
ARGS_KEY = "args"
CHECKPOINT_INFO_KEY = "checkpoint_info"
ITERATION_KEY = "iteration"

SEQUENTIAL_LAYERS = (
    "input_layernorm.weight",
    "input_layernorm.bias",
    "self_attention.dense.bias",
    "post_attention_layernorm.weight",
    "post_attention_layernorm.bias",
    "mlp.dense_4h_to_h.bias",
    "position_embeddings.weight",
)
"""Tensors of a layer file that all tensor-parallel ranks hold whole."""
LAYER_CONCAT_DIM = {"self_attention.dense.weight": 1, "mlp.dense_4h_to_h.weight": 1}
"""Tensors that are divided along another dimension than 0."""


class DeepSpeedCheckpoint:
    """A checkpoint directory, seen from a grid of ranks that is no larger than the one that saved it.

    Args:
        dir: The directory of one tag.
        tp_degree: Tensor-parallel ranks that ask; None is as many as saved.
        pp_degree: Pipeline stages that ask.
        dp_degree: Data-parallel ranks that ask.
        final_layer_norm_idx: Which of the layer files is the final norm's.

    Attributes:
        file_list: All files.
        layer_files: Files of layers.
        mp_rank_files: Model files, by model-parallel rank.
        layer_keys: "layer_XX" of each layer file, once, in order.
        zero_checkpoint: The optimizer files.
        old_2d_map: Model files of each (pipeline, tensor) position that saved.
        new_2d_map: Model files of each position that asks.

    Raises:
        ValueError: Naming what is missing, or why the grids do not fit.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        dp_degree: int | None = None,
        final_layer_norm_idx: int = FINAL_LAYER_NORM_INDEX,
    ) -> None:
        self.dir = os.fspath(dir)
        self.final_layer_norm_idx = final_layer_norm_idx
        self._files = DeepSpeedDirectory(dir)
        self.zero_checkpoint = ZeROCheckpoint(dir)
        source = self.zero_checkpoint.src_3d
        self.tp_degree = source.tp_degree if tp_degree is None else tp_degree
        self.pp_degree = source.pp_degree if pp_degree is None else pp_degree
        self.dp_degree = source.dp_degree if dp_degree is None else dp_degree
        self.original_world_size = source.world_size()
        self.world_size = self.tp_degree * self.pp_degree * self.dp_degree
        self.zero_checkpoint.reshape(model_3d_desc(self.pp_degree, self.tp_degree, self.dp_degree))
        self.old_2d_map = meg_2d_parallel_map(source.pp_degree, source.tp_degree)
        self.old_2d_map.simple_init()
        self.new_2d_map = reshape_meg_2d_parallel(source.pp_degree, source.tp_degree, self.pp_degree, self.tp_degree)
        self._list_files()
        self._map_layers()
        self.global_state: dict[str, Any] = {}

    # ---- what changed ----

    def is_change_tp_degree(self) -> bool:
        """True if the number of tensor-parallel ranks differs from that of the save."""
        return self.tp_degree != self.zero_checkpoint.get_src_tp_degree()

    def is_change_pp_degree(self) -> bool:
        """True if the number of pipeline stages differs from that of the save."""
        return self.pp_degree != self.zero_checkpoint.get_src_pp_degree()

    def is_change_dp_degree(self) -> bool:
        """True if the number of data-parallel ranks differs from that of the save."""
        return self.dp_degree != self.zero_checkpoint.get_src_dp_degree()

    # ---- model files ----

    def get_2d_parallel_files(self, tp_index: int, pp_index: int) -> list[str]:
        """The model files of a position.

        Raises:
            ValueError: If there is no such position.
        """
        return [self.mp_rank_files[number] for number in self.new_2d_map.get_data(pp_index, tp_index)]

    def get_2d_parallel_state(self, tp_index: int, pp_index: int) -> dict[str, Any]:
        """Their content, tensors joined along dimension 0."""
        first, *others = (self._load(file) for file in self.get_2d_parallel_files(tp_index, pp_index))
        for state in others:
            first = merge_state(first, state)
        return first

    def get_zero_checkpoint_state(
        self, pp_index: int, tp_index: int, dp_index: int, strip_tensor_paddings: bool = True
    ) -> dict[str, Any]:
        """The optimizer state of a rank; see `ZeROCheckpoint.get_state_for_rank`."""
        return self.zero_checkpoint.get_state_for_rank(
            pp_index, tp_index, dp_index, ["param_shapes"], strip_tensor_paddings
        )

    def get_zero_files(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """The optimizer files of a rank."""
        return self.zero_checkpoint.get_files_for_rank(pp_index, tp_index, dp_index)

    # ---- layers ----

    def get_embedding_layer_id(self) -> str:
        """ "layer_XX" of the embedding."""
        return self._layer_key(EMBEDDING_LAYER_INDEX)

    def get_final_norm_layer_id(self) -> str:
        """ "layer_XX" of the final norm."""
        return self._layer_key(self.final_layer_norm_idx)

    def get_embedding_files(self, tp_index: int) -> list[str]:
        """The embedding's files of a tensor-parallel rank."""
        return self._of_rank(self.tp_to_embedding_map, tp_index)

    def get_embedding_state(self, tp_index: int) -> dict[str, Any]:
        """The embedding of a tensor-parallel rank, shards joined."""
        return self._merged(self.get_embedding_files(tp_index))

    def get_final_norm_files(self, tp_index: int) -> list[str]:
        """The final norm's files of a tensor-parallel rank."""
        return self._of_rank(self.tp_to_final_norm_map, tp_index)

    def get_final_norm_state(self, tp_index: int) -> dict[str, Any]:
        """The final norm, which every rank holds whole."""
        return self._load(self.get_final_norm_files(tp_index)[0])

    def get_transformer_state(self, tp_index: int, pp_index: int) -> list[dict[str, Any]]:
        """The transformer layers of a position in order, shards joined.

        Raises:
            ValueError: If there is no such position.
        """
        self.new_2d_map.get_data(pp_index, tp_index)
        return [self._merged(files) for files in self.transformer_file_map.get((tp_index, pp_index), [])]

    def get_pp_transformer_map(self, pp_index: int) -> list[str]:
        """ "layer_XX" of a stage's transformer layers."""
        if pp_index not in self.pp_to_transformer_map:
            raise ValueError(f"pp index {pp_index} is not within the pp degree {self.pp_degree}")
        return self.pp_to_transformer_map[pp_index]

    # ---- metadata ----

    def get_iteration(self) -> int:
        """The first model file's `iteration`, or 0."""
        return int(self._global(ITERATION_KEY) or 0)

    def get_args(self) -> Any:
        """The first model file's `args`, a namespace, or None."""
        found = self._global(ARGS_KEY)
        if getattr(found, "full_name", "") == "argparse.Namespace":
            return argparse.Namespace(**found.state)
        return found

    def get_checkpoint_info(self, info_key: str = CHECKPOINT_INFO_KEY) -> Any:
        """Any value of the first model file, or None."""
        return self._global(info_key)

    def validate_files(self) -> None:
        """Check that all files are still there.

        Raises:
            ValueError: Listing those that are not.
        """
        if gone := [file for file in self.file_list if not os.path.isfile(file)]:
            raise ValueError(f"{self.dir}: files are missing: {gone}")

    # ---- printing ----

    def show_2d_mapping(self) -> None:
        """Print the model files of each position."""
        print("reshaped 2d map ---- begin")
        for pp in range(self.pp_degree):
            for tp in range(self.tp_degree):
                print(f"[{pp}, {tp}] = {self.get_2d_parallel_files(tp_index=tp, pp_index=pp)}")
        print("reshaped 2d map ---- end")

    def show_tp_embedding_map(self) -> None:
        """Print the embedding's files of each tensor-parallel rank."""
        _show("tp_to_embedding_layers", self.tp_to_embedding_map)

    def show_tp_final_norm_map(self) -> None:
        """Print the final norm's files of each tensor-parallel rank."""
        _show("tp_to_final_norm_layers", self.tp_to_final_norm_map)

    def show_pp_transformer_map(self) -> None:
        """Print the layers of each stage."""
        _show("pp_to_transformer_layers", self.pp_to_transformer_map)

    def show_transformer_file_map(self) -> None:
        """Print the layer files of each position."""
        _show("rank_to_transformer_files", self.transformer_file_map)

    # ---- inside ----

    def _list_files(self) -> None:
        self.file_list = sorted(str(file) for file in Path(self.dir).rglob("*") if file.is_file())
        self.mp_rank_files = [str(self._files.first_model_file(mp)) for mp in self._files.mp_ranks]
        layers = self._files.layer_files
        self.layer_files = [str(file) for files in layers.values() for file in files.values()]
        width = 2 if not layers else len(Path(self.layer_files[0]).name.split("_")[1].split("-")[0])
        self._by_key = {f"layer_{layer:0{width}d}": [str(f) for f in files.values()] for layer, files in layers.items()}
        self.layer_keys = list(self._by_key)
        self.layer_count = len(self.layer_keys)

    def _map_layers(self) -> None:
        """Layers among stages in equal numbers, the last stage also takes the rest; files among tensor ranks."""
        middle = self.layer_keys[1 : self.final_layer_norm_idx]
        each = max(1, len(middle) // self.pp_degree)
        self.pp_to_transformer_map: dict[int, list[str]] = {pp: [] for pp in range(self.pp_degree)}
        self.transformer_file_map: dict[tuple[int, int], list[list[str]]] = {}
        for number, key in enumerate(middle):
            pp = min(number // each, self.pp_degree - 1)
            self.pp_to_transformer_map[pp].append(key)
            for tp, files in enumerate(parts(self._by_key[key], self.tp_degree, f"files of {key}")):
                self.transformer_file_map.setdefault((tp, pp), []).append(files)
        self.tp_to_embedding_map = self._other_layer(EMBEDDING_LAYER_INDEX)
        self.tp_to_final_norm_map = self._other_layer(self.final_layer_norm_idx)

    def _other_layer(self, index: int) -> dict[int, list[str]]:
        if not self.layer_keys:
            return {}
        key = self._layer_key(index)
        return dict(enumerate(parts(self._by_key[key], self.tp_degree, f"files of {key}")))

    def _layer_key(self, index: int) -> str:
        if not -self.layer_count <= index < self.layer_count:
            raise ValueError(f"{self.dir}: has {self.layer_count} layer files, none with index {index}")
        return self.layer_keys[index]

    def _of_rank(self, files: dict[int, list[str]], tp_index: int) -> list[str]:
        if tp_index not in files:
            raise ValueError(
                f"{self.dir}: tp index {tp_index} is not within the tp degree {self.tp_degree}, or there are no layer "
                "files"
            )
        return files[tp_index]

    def _merged(self, files: list[str]) -> dict[str, Any]:
        states = [self._load(file) for file in files]
        return {name: _joined(name, [state[name] for state in states]) for name in states[0]}

    def _load(self, file: str) -> dict[str, Any]:
        loaded = self._files.load(Path(file))
        if not isinstance(loaded, dict):
            raise ValueError(f"{file} holds a {type(loaded).__name__}, not a state dict")
        return loaded

    def _global(self, key: str) -> Any:
        if key not in self.global_state:
            self.global_state[key] = self._load(self.mp_rank_files[0]).get(key)
        return self.global_state[key]


def _joined(name: str, values: list[Any]) -> Any:
    if name in SEQUENTIAL_LAYERS or not isinstance(values[0], torch.Tensor):
        return values[0]
    return merge(name, values, Rule("row" if LAYER_CONCAT_DIM.get(name) == 1 else "column"))


def _show(tag: str, data: dict[Any, Any]) -> None:
    print(f"Dump mapping: {tag}")
    for key, value in data.items():
        print(f"{key} = {value}")


# ---- optimizer files ----

_OPTIMIZER = "optimizer_state_dict"
_PADDINGS = "group_paddings"
_COUNTS = "partition_count"


class ZeROCheckpoint:
    """The optimizer files of one checkpoint.

    Args:
        dir: The directory of one tag.

    Attributes:
        dir: The same.
        file_list: Optimizer files, by data rank and then by model-parallel rank.
        num_files: How many.
        src_3d: The degrees that saved it.
        target_3d: The degrees that states are asked for.

    Raises:
        ValueError: If it is no DeepSpeed checkpoint, or has no optimizer files, or some are missing.
    """

    def __init__(self, dir: str | os.PathLike[str]) -> None:
        self.dir = os.fspath(dir)
        self._files = DeepSpeedDirectory(dir)
        degrees = self._files.degrees
        self.file_list = [str(file) for file in self._files.optimizer_files.values()]
        self.num_files = len(self.file_list)
        if not self.file_list:
            raise ValueError(f"{self.dir}: has no ZeRO optimizer files ([bf16_]zero_pp_rank_*_optim_states.pt)")
        self.src_3d = model_3d_desc(degrees.pp, degrees.tp, degrees.dp)
        self.reshape(model_3d_desc(degrees.pp, degrees.tp, degrees.dp))

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Ask for states of another grid from now on.

        Raises:
            ValueError: If files would have to be divided, saying where.
        """
        self._maps: list[meg_2d_parallel_map] = self.src_3d.reshape(target_3d_desc)
        self.target_3d = target_3d_desc

    def get_src_world_size(self) -> int:
        """Ranks that saved."""
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        """Tensor-parallel ranks that saved."""
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        """Pipeline stages that saved."""
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        """Data-parallel ranks that saved."""
        return self.src_3d.dp_degree

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Numbers in `file_list` of the files of one rank of the target grid.

        Raises:
            ValueError: If there is no such rank.
        """
        if not 0 <= dp_index < len(self._maps):
            raise ValueError(f"dp index {dp_index} is not within the dp degree {len(self._maps)}")
        return self._maps[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """The files for a rank."""
        return [self.file_list[number] for number in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)]

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Sequence[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> dict[str, Any]:
        """The optimizer state of one rank of the target grid: its files' flat tensors one after the other.

        Args:
            pp_index: Pipeline stage.
            tp_index: Tensor-parallel rank.
            dp_index: Data-parallel rank.
            keys_to_ignore: Keys at the top to leave out.
            strip_tensor_paddings: Cut what pads the flat moments at their ends.

        Raises:
            ValueError: If there is no such rank, or the states do not have the same structure.
        """
        merged: dict[str, Any] | None = None
        for file in self.get_files_for_rank(pp_index, tp_index, dp_index):
            state = {key: value for key, value in self._files.load(Path(file)).items() if key not in keys_to_ignore}
            optimizer = state.get(_OPTIMIZER)
            if strip_tensor_paddings and isinstance(optimizer, Mapping):
                _strip(optimizer)
            merged = state if merged is None else merge_state(merged, state)
        assert merged is not None
        optimizer = merged.get(_OPTIMIZER)
        if isinstance(optimizer, MutableMapping):
            if isinstance(optimizer.get(_COUNTS), list):
                optimizer[_COUNTS] = [self.target_3d.dp_degree] * len(optimizer[_COUNTS])
            if strip_tensor_paddings and optimizer.get(_PADDINGS):
                optimizer[_PADDINGS] = [0] * len(optimizer[_PADDINGS])
        return merged

    def print_3d_index_map(self, tag: str | None = None) -> None:
        """Print which files each rank takes, by number."""
        print(f"3D index map: {tag or ''}")
        for number, grid in enumerate(self._maps):
            grid.print_data(f"dp = {number}")

    def print_3d_file_map(self, tag: str | None = None) -> None:
        """Print which files each rank takes, by name."""
        print(f"3D file map: {tag or ''}")
        for dp, grid in enumerate(self._maps):
            for pp in range(grid.pp_degree):
                for tp in range(grid.tp_degree):
                    print(f"{pp}, {tp}, {dp} => {self.get_files_for_rank(pp, tp, dp)}")


def _strip(optimizer: Mapping[str, Any]) -> None:
    """Cuts the padding of the base optimizer's flat tensors, in place."""
    base, paddings = optimizer.get("base_optimizer_state"), optimizer.get(_PADDINGS)
    if not isinstance(base, Mapping) or not paddings:
        return  # an elastic checkpoint: it has none
    for group, state in base.get("state", {}).items():
        for key, value in state.items():
            if paddings[group] and isinstance(value, torch.Tensor) and value.dim():
                state[key] = value[: value.numel() - paddings[group]].clone()


_USAGE = "--input_folder ROOT/TAG --output_folder ROOT/TAG_universal"


def universal_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="ds_to_universal", description="Turns a DeepSpeed checkpoint into a universal one.", epilog=_USAGE
    )
    parser.add_argument("--input_folder", required=True, help="directory of one tag of a DeepSpeed checkpoint")
    parser.add_argument("--output_folder", required=True, help="directory of the universal checkpoint")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="has no effect")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="has no effect")
    parser.add_argument("--keep_temp_folder", action="store_true", help="has no effect: there is none")
    parser.add_argument(
        "--no_strict", dest="strict", action="store_false", help="patterns that match no parameter are no error"
    )
    parser.add_argument(
        "--inject_missing_state",
        action="store_true",
        help="without universal_checkpoint_info, join tensor-parallel shards along dimension 0",
    )
    return parser.parse_args(arguments)


def convert_to_universal(args: argparse.Namespace | None = None) -> None:
    """Convert, as the command does.

    Args:
        args: `input_folder`, `output_folder`, and, if they are to have an effect, `strict` and `inject_missing_state`.
            None takes the command line.

    Raises:
        ValueError: Naming what is missing or damaged in the input, patterns that match no parameter, or what the format
            cannot hold.
        OSError: If the file system fails.
    """
    from zero_strategy.convert import deepspeed
    from zero_strategy.convert import universal as deepspeed_universal
    from zero_strategy.convert.megatron import MergeRules

    args = universal_arguments() if args is None else args
    source, target = Path(args.input_folder), Path(args.output_folder)
    model = _first_model(source)
    info = model.get("universal_checkpoint_info")
    options: dict[str, Any] = {}
    if info is None and getattr(args, "inject_missing_state", False) and _tensor_ranks(model) > 1:
        options["rules"] = MergeRules()
    state = deepspeed.read(source, **options)
    if info is not None:
        from zero_strategy.convert.deepspeed_model import plain

        unused = MergeRules.from_info(info).unused(name for group in state.optimizers for name in _trained_names(group))
        if unused and getattr(args, "strict", True):
            raise ValueError(
                f"{source}: patterns of universal_checkpoint_info match no parameter: {unused}; correct them, or pass "
                "--no_strict"
            )
        state.user["deepspeed"] = {**state.user.get("deepspeed", {}), "universal_checkpoint_info": plain(info)}
    deepspeed_universal.write(state, target)


def _first_model(source: Path) -> Any:
    from zero_strategy.convert.deepspeed import read_model_files
    from zero_strategy.convert.deepspeed_model import CheckpointFiles

    if not source.is_dir():
        raise ValueError(f"{source} is not a directory")
    files = CheckpointFiles.find(source)
    if not files.ranks:
        raise ValueError(f"{source} is not a DeepSpeed checkpoint; name the directory of one tag, not its parent")
    return read_model_files(files.ranks[min(files.ranks)]).first


def _tensor_ranks(model: Any) -> int:
    found = model.get("checkpoint_parallel_dimensions") or {}
    return int(found.get("tp_degree") or model.get("mp_world_size") or 1)


def _trained_names(optimizer: Any) -> list[str]:
    return [name for group in optimizer.param_groups for name in group["params"]]
