"""State dicts of checkpoints: Megatron's for any number of tensor-parallel ranks, and whole fp32 weights.

Names, arguments and results are DeepSpeed's (`deepspeed.runtime.state_dict_factory`, `deepspeed.utils.zero_to_fp32`).
Files are read by the restricted unpickler; joining and dividing is `convert.megatron`, and full weights come of any
checkpoint, ours or DeepSpeed's.
"""

from __future__ import annotations

import copy
import json
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint.disk import beside, remove
from zero_strategy.checkpoint.layout import parse_object
from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.convert.convert import cast_weights, foreign_format, open_any
from zero_strategy.convert.megatron import merge, merge_states, missing_names, rule_of, split, split_state
from zero_strategy.convert.portable import (
    PortableOptimizer,
    PortableReader,
    PortableState,
    StoredTensor,
    loaded,
    portable_of,
    write_portable,
)
from zero_strategy.runtime.regular_files import read_regular
from zero_strategy.runtime.terminal import parse_size

AUTO_MODULE_KEY = "auto"
_MODULE_KEYS = ("module", "model")
_QKV = "attention.query_key_value"

State = MutableMapping[str, Any]


class SDLoaderFactory:
    """Makes loaders."""

    @staticmethod
    def get_sd_loader_json(json_file: str | os.PathLike[str] | Mapping[str, Any], checkpoint_engine: Any = None) -> Any:
        """A loader for a description `{"type", "checkpoints", "version"}`.

        Args:
            json_file: The description or the path of a file with it.
            checkpoint_engine: Something with `load(path, map_location=...)`; None is the restricted unpickler.

        Returns:
            The loader; of the types `bloom` and `ds_model` the description itself.

        Raises:
            ValueError: If a key is missing or the type is not known.
        """
        if isinstance(json_file, Mapping):
            data = dict(json_file)
        else:
            data = parse_object(read_regular(json_file), os.fspath(json_file))
        if missing := sorted({"type", "checkpoints", "version"} - data.keys()):
            raise ValueError(f"the description of a checkpoint lacks {missing}; it has {sorted(data)}")
        if str(data["type"]).lower() in ("bloom", "ds_model"):
            return data
        return SDLoaderFactory.get_sd_loader(data["checkpoints"], checkpoint_engine, data["type"], data["version"])

    @staticmethod
    def get_sd_loader(
        ckpt_list: Sequence[str | os.PathLike[str]],
        checkpoint_engine: Any = None,
        sd_type: str = "Megatron",
        version: float | None = None,
    ) -> MegatronSDLoader:
        """A loader for the files of all tensor-parallel ranks.

        Raises:
            ValueError: If the type is not "Megatron", or see `SDLoaderBase`.
        """
        if sd_type != "Megatron":
            raise ValueError(f"checkpoint type {sd_type!r} is not supported, only 'Megatron'")
        return MegatronSDLoader(ckpt_list, version, checkpoint_engine)


class SDLoaderBase(ABC):
    """Loads the state dict of one rank from the files of another number of ranks.

    Args:
        ckpt_list: One file per tensor-parallel rank that saved, in order.
        version: The checkpoint's version; None takes the one in the files.
        checkpoint_engine: Something with `load(path, map_location=...)`; None is the restricted unpickler.

    Raises:
        ValueError: If there are no files, or not as many as the first one says.
    """

    def __init__(
        self, ckpt_list: Sequence[str | os.PathLike[str]], version: float | None, checkpoint_engine: Any = None
    ) -> None:
        self.module_key: str | None = None
        self.ckpt_list = list(ckpt_list)
        self.version = version
        self.checkpoint_engine = checkpoint_engine
        self.check_ckpt_list()

    def load(
        self,
        mp_world_size: int,
        mp_rank: int,
        module_key: str | None = AUTO_MODULE_KEY,
        is_pipe_parallel: bool = False,
        quantize: bool = False,
        quantize_bits: int = 8,
        quantize_groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[Any, State, tuple[None, int]]:
        """The state dict of one rank.

        Files are used as they are where there are as many as ranks, else joined or divided. `mp_rank_*` files of a
        pipeline (`is_pipe_parallel` with a module key) hold no weights and are alike: the first one serves.

        Args:
            mp_world_size: Ranks that load.
            mp_rank: This one.
            module_key: Where the model is in the state dict; None is the top, "auto" is `module` or `model`.
            is_pipe_parallel: Whether a pipeline loads.
            quantize: Not supported.
            quantize_bits: Has no effect.
            quantize_groups: Has no effect.
            mlp_extra_grouping: Has no effect.

        Returns:
            (path of the first file used, state dict, (None, number of files joined)).

        Raises:
            NotImplementedError: If `quantize` is set.
            ValueError: If the numbers of files and ranks do not divide, or see `merge_state_dict`.
        """
        if quantize:
            raise NotImplementedError("quantizing while loading is not supported; quantize the loaded weights")
        self.module_key = module_key
        count = len(self.ckpt_list)
        if not 0 <= mp_rank < mp_world_size:
            raise ValueError(f"mp_rank {mp_rank} is not within mp_world_size {mp_world_size}")
        index = mp_rank * count // mp_world_size
        if is_pipe_parallel and module_key is not None and mp_world_size != count:
            mp_world_size, index = count, 0
        path, merged = self.ckpt_list[index], 1
        if count == mp_world_size:
            state = self._load(path)
        elif count > mp_world_size:
            state, _, merged = self.merge_state_dict(mp_world_size, mp_rank)
        else:
            state, _ = self.split_state_dict(mp_world_size, mp_rank)
        return path, state, (None, merged)

    def get_merge_state_dicts(self, mp_world_size: int, mp_rank: int) -> list[State]:
        """The files that a rank of a smaller world joins.

        Raises:
            ValueError: If the number of files is no multiple of the ranks.
        """
        count = len(self.ckpt_list)
        if count % mp_world_size:
            raise ValueError(f"{count} checkpoint files cannot be merged for {mp_world_size} ranks evenly")
        each = count // mp_world_size
        return [self._load(path) for path in self.ckpt_list[each * mp_rank : each * (mp_rank + 1)]]

    def get_split_state_dict(self, mp_world_size: int, mp_rank: int) -> tuple[State, int, int]:
        """The file that a rank of a larger world takes a part of, the number of parts, and which.

        Raises:
            ValueError: If the number of ranks is no multiple of the files.
        """
        count = len(self.ckpt_list)
        if mp_world_size % count:
            raise ValueError(f"{count} checkpoint files cannot be divided among {mp_world_size} ranks evenly")
        each = mp_world_size // count
        return self._load(self.ckpt_list[mp_rank // each]), each, mp_rank % each

    def get_module(self, sd: State) -> Any:
        """The model's part of a state dict."""
        return sd if self.module_key is None else sd[self._key_in(sd)]

    def set_module(self, sd: State, module: Any) -> Any:
        """The state dict with another model; without a module key the model itself."""
        if self.module_key is None:
            return module
        sd[self._key_in(sd)] = module
        return sd

    def check_ckpt_list(self) -> None:
        """Compare the number of files with the world size in the first.

        Raises:
            ValueError: If there are none or they differ.
        """
        if not self.ckpt_list:
            raise ValueError("there are no checkpoint files to load")
        saved = self._load(self.ckpt_list[0]).get("mp_world_size", len(self.ckpt_list))
        if saved != len(self.ckpt_list):
            raise ValueError(f"{len(self.ckpt_list)} checkpoint files are given, but mp_world_size {saved} saved them")

    @abstractmethod
    def merge_state_dict(
        self,
        mp_world_size: int,
        mp_rank: int,
        quantize: bool = False,
        quantize_bits: int = 8,
        groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[State, None, int]:
        """(joined state dict, None, number of files)."""

    @abstractmethod
    def split_state_dict(
        self,
        mp_world_size: int,
        mp_rank: int,
        quantize: bool = False,
        quantize_bits: int = 8,
        groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[State, None]:
        """(part of a state dict, None)."""

    @abstractmethod
    def sanity_check(self, ckpt_file_name: str | os.PathLike[str]) -> None:
        """Raise ValueError if a file does not hold such a model."""

    def _key_in(self, sd: State) -> str:
        if self.module_key != AUTO_MODULE_KEY:
            assert self.module_key is not None
            return self.module_key
        found = [key for key in _MODULE_KEYS if key in sd]
        if len(found) != 1:
            raise ValueError(f"a checkpoint must have one of the keys {_MODULE_KEYS}, it has {found or 'neither'}")
        return found[0]

    def _load(self, path: str | os.PathLike[str]) -> State:
        if self.checkpoint_engine is None:
            from zero_strategy.convert.pickles import load_restricted

            return _mapping(path, load_restricted(path))
        loader: Callable[..., Any] = self.checkpoint_engine.load
        return _mapping(path, loader(path, map_location="cpu"))


class MegatronSDLoader(SDLoaderBase):
    """State dicts of Megatron-LM's transformer; see `convert.megatron` for what is divided how."""

    def merge_query_key_value(self, param_list: Sequence[torch.Tensor], ckpt_ver: float) -> torch.Tensor:
        """Join shards of a fused query-key-value weight or bias.

        Raises:
            ValueError: If they do not fit or the version is not known.
        """
        return merge(_QKV, param_list, rule_of(_QKV, ckpt_ver))

    def split_query_key_value(
        self, param: torch.Tensor, num_to_split: int, offset: int, ckpt_ver: float
    ) -> torch.Tensor:
        """Part `offset` of `num_to_split` of a fused query-key-value weight or bias.

        Raises:
            ValueError: If it cannot be divided so or the version is not known.
        """
        return split(_QKV, param, rule_of(_QKV, ckpt_ver), num_to_split)[offset]

    def merge_state_dict(
        self,
        mp_world_size: int,
        mp_rank: int,
        quantize: bool = False,
        quantize_bits: int = 8,
        groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[State, None, int]:
        """Join the files of neighbouring ranks.

        Returns:
            (the first file's state dict with the joined model, None, number of files).

        Raises:
            ValueError: If this is no Megatron transformer or shards do not fit, by name.
        """
        self.sanity_check(self.ckpt_list[0])
        states = self.get_merge_state_dicts(mp_world_size, mp_rank)
        version = self.get_checkpoint_version(states[0])
        merged = merge_states([self.get_module(state) for state in states], version)
        return self.set_module(copy.copy(states[0]), merged), None, len(states)

    def split_state_dict(
        self,
        mp_world_size: int,
        mp_rank: int,
        quantize: bool = False,
        quantize_bits: int = 8,
        groups: int = 64,
        mlp_extra_grouping: bool = True,
    ) -> tuple[State, None]:
        """Take a part of one file.

        Returns:
            (the file's state dict with this part of the model, None).

        Raises:
            ValueError: If a tensor cannot be divided so, by name.
        """
        state, count, offset = self.get_split_state_dict(mp_world_size, mp_rank)
        part = split_state(self.get_module(state), self.get_checkpoint_version(state), count, offset)
        return self.set_module(copy.copy(state), part), None

    def sanity_check(self, ckpt_file_name: str | os.PathLike[str]) -> None:
        """Look for the names of a Megatron transformer.

        Raises:
            ValueError: Listing those that are missing.
        """
        if missing := missing_names(self.get_module(self._load(ckpt_file_name))):
            raise ValueError(f"{ckpt_file_name} is not a Megatron transformer: no name contains {missing}")

    def get_checkpoint_version(self, state_dict: State) -> float:
        """The version given, or the file's `checkpoint_version`, or 0."""
        return self.version if self.version is not None else state_dict.get("checkpoint_version", 0)


def _mapping(path: str | os.PathLike[str], loaded: Any) -> State:
    if not isinstance(loaded, MutableMapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, not a state dict")
    return loaded


# ---- whole fp32 weights ----

_ALL_IN_ONE = 2**62


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Full weights on the host, floating-point ones in fp32: master weights where there are any.

    Args:
        checkpoint_dir: The folder of checkpoints, or one of them.
        tag: Which; None: what `latest` names.
        exclude_frozen_parameters: Leave out what no optimizer trains; buffers are left out, too.
        lazy_mode: Without effect: tensors are read one after the other.

    Raises:
        ValueError: If there is no such checkpoint, it is damaged, or of no known kind.
    """
    state = _fp32(checkpoint_dir, tag, exclude_frozen_parameters)
    found = {name: loaded(tensor) for name, tensor in state.weights.items()}
    return {**found, **{alias: found[name] for alias, name in state.aliases.items() if name in found}}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load these weights into an ordinary model, moved to the CPU, and return it.

    Raises:
        RuntimeError: If names or shapes differ.
        ValueError: As above.
    """
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write these weights as files of a Hugging Face model.

    Args:
        checkpoint_dir: See above.
        output_dir: A folder, which may exist; files of these names in it are replaced.
        max_shard_size: Most bytes of a file; None: all in one.
        safe_serialization: Write `model*.safetensors` instead of `pytorch_model*.bin`.
        tag: See above.
        exclude_frozen_parameters: See above.
    """
    state = _fp32(checkpoint_dir, tag, exclude_frozen_parameters)
    most = _ALL_IN_ONE if max_shard_size is None else parse_size(str(max_shard_size))
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    temporary = beside(output / "weights", uuid.uuid4().hex[:12], "tmp")
    try:
        if safe_serialization:
            write_portable(state, temporary, max_file_bytes=most)
            (temporary / MANIFEST_NAME).unlink()
        else:
            _write_torch(state, temporary, most)
        for file in sorted(temporary.iterdir()):
            os.replace(file, output / file.name)
    finally:
        remove(temporary)


def _fp32(checkpoint_dir: str | os.PathLike[str], tag: str | None, trained_only: bool) -> PortableState:
    path = Path(checkpoint_dir)
    foreign = foreign_format(path)
    if tag is None:
        reader = open_any(path)
    elif foreign is not None and foreign.name == "deepspeed":
        reader = open_any(path, source=foreign.name, tag=tag)
    else:
        reader = open_any(path / tag)
    state = cast_weights(reader.state if isinstance(reader, PortableReader) else portable_of(reader), torch.float32)
    weights = state.weights
    if trained_only:
        trained = {name for optimizer in state.optimizers for name in _trained(optimizer)}
        weights = {name: tensor for name, tensor in weights.items() if name in trained}
    aliases = {alias: name for alias, name in state.aliases.items() if name in weights}
    return PortableState(weights=weights, aliases=aliases)


def _trained(optimizer: PortableOptimizer) -> set[str]:
    """Parameters that it has updated; a frozen one may be in its groups and has no state."""
    held = {name for group in optimizer.param_groups for name in group["params"]}
    stateful = set(optimizer.scalars).union(*(t for kind, t in optimizer.kinds.items() if kind != "master"))
    return held & stateful if stateful else held


def _write_torch(state: PortableState, directory: Path, most: int) -> None:
    directory.mkdir()
    shards = list(_shards(state.weights, most))
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = "pytorch_model.bin"
        if len(shards) > 1:
            file = f"pytorch_model-{number + 1:05d}-of-{len(shards):05d}.bin"
        tensors = {name: loaded(state.weights[name]) for name in names}
        tensors |= {alias: tensors[name] for alias, name in state.aliases.items() if name in tensors}
        torch.save(tensors, directory / file)
        places |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        size = sum(tensor.spec.nbytes for tensor in state.weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shards(weights: dict[str, StoredTensor], most: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in weights.items():
        if names and size + tensor.spec.nbytes > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.spec.nbytes
    yield names
