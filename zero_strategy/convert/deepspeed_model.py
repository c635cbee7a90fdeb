"""Model and optimizer states of a DeepSpeed checkpoint: its files' names, flat buffers of ranks, the full state.

The files of a checkpoint:

    ROOT/latest                                       text: the tag
    ROOT/TAG/mp_rank_MM_model_states.pt               stages 0 to 2
    ROOT/TAG/zero_pp_rank_D_mp_rank_MM_model_states.pt  stage 3, one per data-parallel rank
    ROOT/TAG/[bf16_|fp16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt   one per data-parallel rank
    ROOT/TAG/layer_LL[-model_TT]-model_states.pt      pipelines
    ROOT/TAG/offloaded_tensors/rankRR/*.tensor.swp    optimizer state kept on NVMe

"pp_rank" in these names is the data-parallel rank D, without leading zeros; MM is the model-parallel rank.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import Scalar
from zero_strategy.convert.pickle_globals import Record
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import PortableOptimizer, PortableState, StoredTensor
from zero_strategy.runtime.regular_files import read_text


@dataclass
class MasterState:
    """Contents of the optimizer files of one model-parallel rank.

    Attributes:
        fp32: The optimizer's own copy of each weight by name; fp32, unless DeepSpeed was told to keep it lower.
        optimizer: State per element, numbers, hyper-parameters; without "master".
        loss_scaler: As it was pickled, or None.
    """

    fp32: dict[str, StoredTensor] = field(default_factory=dict)
    optimizer: PortableOptimizer = field(default_factory=PortableOptimizer)
    loss_scaler: Any = None

    def add_scalars(self, names: Sequence[str], scalars: Mapping[str, Any]) -> None:
        """Gives parameters the numbers of their flat buffer; steps as torch's optimizers keep them.

        Args:
            names: The parameters in the buffer.
            scalars: Numbers, and 0-d tensors.
        """
        plain: dict[str, Scalar] = {}
        for key, value in scalars.items():
            if isinstance(value, torch.Tensor):
                self.optimizer.scalar_dtypes[key] = str(value.dtype).removeprefix("torch.")
                value = value.item()
            elif key == "step" and isinstance(value, (int, float)):
                # DeepSpeed's own optimizers count in ints, torch's (and their fused forms) in fp32 tensors.
                self.optimizer.scalar_dtypes[key] = "float32"
                value = float(value)
            plain[key] = value
        if plain:
            for name in names:
                self.optimizer.scalars[name] = dict(plain)

    def add_kind(self, kind: str, tensor: StoredTensor) -> None:
        """Adds a parameter's state tensor."""
        self.optimizer.kinds.setdefault(kind, {})[tensor.spec.name] = tensor


def split_state(
    states: Sequence[Any], lengths: Sequence[int], where: str
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Divides one buffer's state into what has a value per element and what is one number.

    Args:
        states: The ranks' state of the buffer: key -> tensor or number.
        lengths: Elements of the ranks' fp32 buffers; state may be longer, by padding.
        where: Names the buffer in errors.

    Returns:
        (key -> the ranks' 1-D tensors, key -> number or 0-d tensor).

    Raises:
        ValueError: If the ranks differ in keys or numbers, or a value is neither; names the key.
    """
    tensors: dict[str, list[Any]] = {}
    scalars: dict[str, Any] = {}
    first = states[0]
    if not all(isinstance(state, dict) and state.keys() == first.keys() for state in states):
        raise ValueError(f"{where}: the ranks' optimizer states have different keys: files of different saves")
    for key in first:
        values = [state[key] for state in states]
        if all(isinstance(v, torch.Tensor) and v.dim() == 1 and v.numel() >= n for v, n in zip(values, lengths)):
            tensors[key] = values
        elif all(_is_number(value) for value in values):
            if len({_number(value) for value in values}) > 1:
                raise ValueError(
                    f"{where}: the ranks have different values of {key!r}: {[_number(v) for v in values][:8]}; "
                    "their files are of different saves"
                )
            scalars[key] = values[0]
        elif any(value is not None for value in values):
            raise ValueError(
                f"{where}: optimizer state {key!r} is {_described(values[0])}, neither one value per element nor a "
                "number; read the weights alone (optimizer=False)"
            )
    return tensors, scalars


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def hyper_parameters(group: Any, where: str) -> dict[str, Any]:
    """A param group's own settings: numbers, strings, lists of them; no parameters, no step count.

    Left out, too, is by which of torch's implementations a step was computed: the loading optimizer has its own choice.

    Raises:
        ValueError: If it is no param group.
    """
    if not isinstance(group, dict):
        raise ValueError(f"{where}: a param group is a {type(group).__name__}")
    left_out = {"params", "param_names", "step", *_IMPLEMENTATION}
    return {key: _plain(value) for key, value in group.items() if key not in left_out and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str) or _is_number(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return _number(value)


def loss_scaler_state(scaler: Any, skipped: int) -> dict[str, Any] | None:
    """DeepSpeed's loss scaler in our form (`LossScaler.state_dict()`), so that the scale grows at the same step.

    DeepSpeed counts iterations (`cur_iter`, the next one's number) and raises the scale in the iterations i with
    (i - last_overflow_iter - 1) a positive multiple of `scale_window`; we count good steps up to the interval. After an
    overflow it therefore waits one step longer (`loss_scale.growth_delay`), hence a count of -1.

    Args:
        scaler: Record of a `LossScaler` or `DynamicLossScaler`, or a dict with its attributes.
        skipped: Steps skipped so far.

    Returns:
        None where there is no scale.
    """
    state = scaler.state if isinstance(scaler, Record) else scaler
    if not isinstance(state, dict) or not isinstance(state.get("cur_scale"), (int, float)):
        return None
    scale, good = float(state["cur_scale"]), 0
    window = state.get("scale_window")
    if isinstance(window, int) and window > 0 and isinstance(state.get("cur_iter"), int):
        stable = state["cur_iter"] - int(state.get("last_overflow_iter", -1)) - 1
        good = (stable - 1) % window if stable > 0 else -1
    elif scale == 1.0:
        return None
    found = {"scale": scale, "good_steps": good, "skipped": skipped}
    tolerated = state.get("cur_hysteresis")
    if isinstance(tolerated, int) and state.get("delayed_shift", tolerated) > 1:
        found["until_lower"] = tolerated
    return found


_EXTRA = "_extra_state"
_SAME_ON_ALL = ("global_steps", "dp_world_size", "mp_world_size", "ds_version")
OWN_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info", "num_experts",
    "ds_autoep_layers",
})  # fmt: skip
"""Top-level keys that DeepSpeed writes; client state lies beside them."""


@dataclass
class ModelFiles:
    """Model states of one model-parallel rank.

    Attributes:
        paths: Its files in rank order; one up to stage 2.
        states: Their contents.
    """

    paths: list[Path]
    states: list[dict[str, Any]]

    def __post_init__(self) -> None:
        for path, state in zip(self.paths, self.states, strict=True):
            for key in _SAME_ON_ALL:
                if state.get(key) != self.first.get(key):
                    raise ValueError(
                        f"{path}: {key} is {state.get(key)!r}, in {self.paths[0].name} {self.first.get(key)!r}: the "
                        "files are of different saves; take another tag"
                    )

    @staticmethod
    def load(path: Path, allow: Mapping[str, None] | None = None, verify: bool = False) -> dict[str, Any]:
        """The content of one file, mapped.

        Raises:
            ValueError: If it is damaged, or no file of model states.
        """
        content = load_restricted(path, allow=allow, verify=verify)
        if not isinstance(content, dict) or "module" not in content:
            raise ValueError(f"{path}: has no entry 'module', so DeepSpeed did not write it")
        return content

    @property
    def first(self) -> dict[str, Any]:
        """Rank 0's content."""
        return self.states[0]

    @property
    def module(self) -> dict[str, Any]:
        """The module's state dict: whole up to stage 2, empty in place of each parameter at stage 3.

        Raises:
            ValueError: If there is none, as in pipelines.
        """
        module = self.first["module"]
        if not isinstance(module, dict):
            raise ValueError(f"{self.paths[0]}: its module is a {type(module).__name__}; pipelines have layer_* files")
        return module

    @property
    def param_shapes(self) -> list[Any]:
        """Parameter -> shape of each group or sub-group, in the order of the optimizer's data; empty at stage 0."""
        tables = self.first.get("param_shapes") or []
        return [tables] if isinstance(tables, dict) else list(tables)  # old versions knew one group only

    def aliases(self) -> dict[str, str]:
        """Further name of a tied tensor -> the first name.

        Tensors of the state dict are one if they begin at the same address; DeepSpeed's own table, which is all there
        is at stage 3, has empty ones among them, which all begin at none.
        """
        found: dict[str, str] = {}
        firsts: dict[tuple[Any, ...], str] = {}
        for name, tensor in self._tensors():
            if tensor.numel():
                key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
                if (first := firsts.setdefault(key, name)) != name:
                    found[name] = first
        shapes = self.shapes()
        for name, first in (self.first.get("shared_params") or {}).items():
            numel = prod(shapes[first]) if first in shapes else 0
            if name in self.module and first in self.module and name not in found and numel:
                found[name] = first
        order = {name: place for place, name in enumerate(self.module)}
        for name, first in list(found.items()):
            while first in found:
                first = found[first]
            found[name] = first
            if order[first] > order[name]:
                raise ValueError(f"{self.paths[0]}: {name!r} is tied to {first!r}, which comes after it")
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> shape, of those that the optimizer had, and of the frozen ones where they are recorded."""
        where = str(self.paths[0])
        tables = [*self.param_shapes, self.first.get("frozen_param_shapes") or {}]
        return {name: shape_of(shape, f"{where}: {name!r}") for table in tables for name, shape in table.items()}

    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters among the state dict's tensors, tied ones once."""
        left_out = {*(self.first.get("buffer_names") or ()), *self.aliases()}
        return {name: tensor for name, tensor in self._tensors() if name not in left_out}

    def extra_states(self) -> dict[str, Any]:
        """Module name -> what its `get_extra_state` returned."""
        keys = [key for key in self.module if key == _EXTRA or key.endswith(f".{_EXTRA}")]
        return {key[: -len(_EXTRA)].removesuffix("."): self.module[key] for key in keys}

    def frozen(self, name: str) -> StoredTensor | None:
        """A parameter that the optimizer did not have, where the state dict has it not, either (stage 3)."""
        shape = self.shapes().get(name)
        parts = [(state.get("frozen_param_fragments") or {}).get(name) for state in self.states]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        if shape is None or len(tensors) != len(parts):
            return None
        piece = -(-prod(shape) // len(parts))
        for path, part in zip(self.paths, tensors, strict=True):
            if part.numel() < piece:
                raise ValueError(f"{path}: has {part.numel()} elements of {name!r}, {piece} are a rank's share")
        return Flat.of([part.reshape(-1) for part in tensors]).stored_by_rank(name, shape, 0)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.module.items():
            if isinstance(value, torch.Tensor):
                yield name, value
            elif not (name == _EXTRA or name.endswith(f".{_EXTRA}")):
                raise ValueError(f"{self.paths[0]}: {name!r} in its module is a {type(value).__name__}, not a tensor")


def assemble(model: ModelFiles, masters: MasterState | None, *, stage: int) -> PortableState:
    """The whole state.

    Args:
        model: Model states.
        masters: What the optimizer files have; None to leave the optimizer out (at stage 3 the weights lie there).
        stage: For information.

    Raises:
        ValueError: Naming a parameter whose values are nowhere, or that has two shapes.
    """
    aliases = model.aliases()
    weights = {name: _weight(model, masters, name, t, stage) for name, t in model._tensors() if name not in aliases}
    return with_training_state(PortableState(weights=weights, aliases=aliases), model, masters, stage=stage)


def with_training_state(
    state: PortableState, model: ModelFiles, masters: MasterState | None, *, stage: int
) -> PortableState:
    """The state with all that is not weights: optimizer, counters, scheduler, loss scale, client state.

    Args:
        state: Has the weights and aliases already; is changed.
        model: Model states.
        masters: What the optimizer files have.
        stage: For information.
    """
    first = model.first
    if masters is not None:
        _add_optimizer(state, masters)
    counters = {key: first[key] for key in ("global_steps", "global_samples", "skipped_steps") if key in first}
    state.counters.update({key: int(value) for key, value in counters.items() if value is not None})
    scaler = masters.loss_scaler if masters is not None else None
    state.loss_scaler = loss_scaler_state(scaler, int(counters.get("skipped_steps") or 0))
    scheduler = first.get("lr_scheduler")
    state.lr_scheduler = plain(scheduler) if isinstance(scheduler, dict) else None
    state.client_state = {str(key): plain(value) for key, value in first.items() if key not in OWN_KEYS}
    if isinstance(first["module"], dict) and (extra := model.extra_states()):
        state.extra_files["extra_state.pt"] = packed(plain(extra))
    version, ranks = first.get("ds_version"), first.get("dp_world_size")
    tag = model.paths[0].parent.name
    state.user["deepspeed"] = {"version": str(version), "stage": stage, "ranks": ranks, "tag": tag}
    return state


def _add_optimizer(state: PortableState, masters: MasterState) -> None:
    order = {name: place for place, name in enumerate(state.weights)}
    if unknown := [name for name in masters.fp32 if name not in order]:
        raise ValueError(f"the optimizer files have {unknown[:5]}, which the model has not")
    optimizer = masters.optimizer
    lower = {name: t for name, t in masters.fp32.items() if t.spec.dtype != state.weights[name].spec.dtype}
    if lower:
        optimizer.kinds["master"] = lower
    for kind, tensors in optimizer.kinds.items():
        optimizer.kinds[kind] = {name: tensors[name] for name in sorted(tensors, key=order.__getitem__)}
    state.optimizers.append(optimizer)


def _weight(
    model: ModelFiles, masters: MasterState | None, name: str, tensor: torch.Tensor, stage: int
) -> StoredTensor:
    """A weight in the dtype that forward uses; of fp32 training, the optimizer's own copy."""
    master = masters.fp32.get(name) if masters is not None else None
    if master is not None:
        if stage < 3 and tuple(tensor.shape) != master.spec.shape:
            raise ValueError(
                f"{model.paths[0]}: {name!r} has the shape {tuple(tensor.shape)}, in param_shapes {master.spec.shape}"
            )
        if master.spec.dtype == tensor.dtype:
            return master
        # Stage 3 stores no low-precision weights; they are the rounded masters, as after each of its steps.
        return cast(master, tensor.dtype) if stage == 3 else StoredTensor.of(name, tensor)
    if stage == 3 and name not in (model.first.get("buffer_names") or ()):
        frozen = model.frozen(name)
        if frozen is not None:
            return frozen
        shape = model.shapes().get(name, tuple(tensor.shape))
        if prod(shape):
            hint = "they are in the optimizer files: read those, too" if masters is None else "the files are incomplete"
            raise ValueError(f"{model.paths[0]}: the values of {name!r} are not in the model states; {hint}")
        return StoredTensor(TensorSpec(name, tensor.dtype, shape), lambda: torch.empty(shape, dtype=tensor.dtype))
    return StoredTensor.of(name, tensor)


# ---- plain data ----


def plain(value: Any) -> Any:
    """The value as what `torch.load(weights_only=True)` takes: records as dicts, tensors with memory of their own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple, set)):
        return type(value)(plain(item) for item in _items(value))
    if isinstance(value, frozenset):
        return {plain(item) for item in value}
    if isinstance(value, Record):
        content = value.entries or value.elements or value.state
        return plain(list(value.arguments) if content is None else content)
    return value


def _items(value: Sequence[Any] | set[Any]) -> Iterable[Any]:
    return value


def packed(value: Any) -> bytes:
    """The bytes of a file of torch.save."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


LATEST = "latest"
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_ZERO_MODEL = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(layer_\d+_expert_|expp_rank_)")


@dataclass
class ModelRank:
    """The files of one model-parallel rank (of a tensor-parallel rank of one pipeline stage).

    Attributes:
        number: The rank.
        model: Data-parallel rank -> file of model states; up to stage 2 only 0.
        optimizer: Data-parallel rank -> file of optimizer states; none at stage 0.
    """

    number: int
    model: dict[int, Path] = field(default_factory=dict)
    optimizer: dict[int, Path] = field(default_factory=dict)


@dataclass
class CheckpointFiles:
    """The files of one tag.

    Attributes:
        directory: The tag's directory.
        ranks: By model-parallel rank; 0 alone without tensor parallelism and pipelines.
        layers: (layer, tensor-parallel rank) -> file, of a pipeline.
    """

    directory: Path
    ranks: dict[int, ModelRank] = field(default_factory=dict)
    layers: dict[tuple[int, int], Path] = field(default_factory=dict)

    @classmethod
    def find(cls, directory: Path) -> CheckpointFiles:
        """The files of a tag's directory, complete or not.

        Raises:
            ValueError: If it has experts of a mixture, or files of one rank under two names.
        """
        found = cls(directory)
        for path in sorted(directory.iterdir()):
            if _EXPERT.match(path.name):
                raise ValueError(f"{path}: mixtures of experts (expert-parallel checkpoints) are not read")
            if match := _MODEL.fullmatch(path.name):
                _put(found.rank(int(match[1])).model, 0, path)
            elif match := _ZERO_MODEL.fullmatch(path.name):
                _put(found.rank(int(match[2])).model, int(match[1]), path)
            elif match := _OPTIMIZER.fullmatch(path.name):
                _put(found.rank(int(match[2])).optimizer, int(match[1]), path)
            elif match := _LAYER.fullmatch(path.name):
                found.layers[int(match[1]), int(match[2] or 0)] = path
        return found

    def all(self) -> list[Path]:
        """Every file of torch.save among them."""
        of_ranks = [path for rank in self.ranks.values() for path in (*rank.model.values(), *rank.optimizer.values())]
        return [*of_ranks, *self.layers.values()]

    def rank(self, number: int) -> ModelRank:
        """The files of a model-parallel rank, added if it was not known."""
        return self.ranks.setdefault(number, ModelRank(number))


def _put(files: dict[int, Path], number: int, path: Path) -> None:
    if number in files:
        other = files[number].name
        raise ValueError(f"{path.parent}: {other} and {path.name} are of the same rank; remove the older one")
    files[number] = path


def complete(files: dict[int, Path], count: int, what: str, source: Path) -> list[Path]:
    """The files of ranks 0 to count - 1, in this order.

    Args:
        files: Rank -> file.
        count: How many ranks saved.
        what: What the files are, for errors.
        source: The file that says so.

    Raises:
        ValueError: Naming the ranks that are missing or too many.
    """
    if missing := sorted(set(range(count)) - files.keys()):
        raise ValueError(
            f"{source.parent}: {what} of data-parallel rank(s) {_listed(missing)} are missing ({source.name} says that "
            f"{count} ranks saved); copy all files, or take an earlier tag"
        )
    if spare := sorted(files.keys() - set(range(count))):
        names = ", ".join(files[number].name for number in spare[:3])
        raise ValueError(
            f"{source.parent}: {source.name} says that {count} ranks saved, but there are {what} of rank(s) "
            f"{_listed(spare)}, left over from another save: remove {names}{' ...' if spare[3:] else ''}"
        )
    return [files[number] for number in range(count)]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:20])) + (" ..." if numbers[20:] else "")


# ---- tags ----


def is_tag(directory: Path) -> bool:
    """True if a directory holds files of one save."""
    if not directory.is_dir():
        return False
    patterns = (_MODEL, _ZERO_MODEL, _LAYER, _OPTIMIZER)
    return any(pattern.fullmatch(path.name) for path in directory.iterdir() for pattern in patterns)


def _tags(root: Path) -> list[str]:
    return sorted((path.name for path in root.iterdir() if is_tag(path)), key=natural)


def natural(name: str) -> list[tuple[int, str]]:
    """Key that sorts "step9" before "step10"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def find_tag(path: Path, tag: str | None = None) -> Path:
    """The directory of a tag.

    Args:
        path: What was given as `save_dir`, or the tag's directory itself.
        tag: Which; by default the one that `latest` names.

    Raises:
        ValueError: If there is none such; lists those there are.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is no directory")
    if tag is None and is_tag(path):
        return path
    named, source = tag, "tag"
    if named is None and (path / LATEST).is_file():
        named, source = read_text(path / LATEST).strip(), f"{path / LATEST}: tag"
    there = _tags(path)
    if named is None:
        if len(there) == 1:
            return path / there[0]
        raise ValueError(f"{path}: has no file {LATEST}; name one of the tags {_names(there)}")
    if named not in there:
        raise ValueError(f"{source} {named!r} is not in {path}; there are {_names(there)}")
    return path / named


def _names(tags: Iterable[str]) -> str:
    return ", ".join(map(repr, tags)) or "none"


Source = Callable[[], torch.Tensor]
"""Gives a rank's flat buffer: a mapped view, or what is read from a file of its own."""


class Flat:
    """One flat vector, divided among the ranks in this order.

    Args:
        parts: The ranks' buffers, 1-D, of one dtype.
        lengths: Their elements.
        dtype: Their dtype.
    """

    def __init__(self, parts: Sequence[Source], lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.parts = parts
        self.lengths = lengths
        self.dtype = dtype

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Flat:
        """One whose buffers are mapped tensors."""
        return cls([_giving(tensor) for tensor in tensors], [t.numel() for t in tensors], tensors[0].dtype)

    def __len__(self) -> int:
        return sum(self.lengths)

    def stored(self, name: str, shape: Sequence[int], start: int) -> StoredTensor:
        """A tensor that begins at an element of the whole vector, whichever ranks it lies on."""
        return self._stored(name, shape, lambda: self._run(start, start + prod(shape)))

    def stored_by_rank(self, name: str, shape: Sequence[int], start: int) -> StoredTensor:
        """A tensor of which every rank has an equal piece, beginning at the same element; the last are padded."""
        numel = prod(shape)
        piece = -(-numel // len(self.parts))
        return self._stored(name, shape, lambda: [part()[start : start + piece] for part in self.parts])

    def _stored(self, name: str, shape: Sequence[int], pieces: Callable[[], list[torch.Tensor]]) -> StoredTensor:
        numel = prod(shape)

        def load() -> torch.Tensor:
            return torch.cat(pieces())[:numel].view(tuple(shape)) if numel else torch.empty(shape, dtype=self.dtype)

        return StoredTensor(TensorSpec(name, self.dtype, tuple(shape)), load)

    def _run(self, start: int, stop: int) -> list[torch.Tensor]:
        pieces, begin = [], 0
        for part, length in zip(self.parts, self.lengths, strict=True):
            low, high = max(start, begin), min(stop, begin + length)
            if low < high:
                pieces.append(part()[low - begin : high - begin])
            begin += length
        return pieces


def _giving(tensor: torch.Tensor) -> Source:
    return lambda: tensor


def cast(stored: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """The tensor, rounded to another dtype."""
    spec = TensorSpec(stored.spec.name, dtype, stored.spec.shape)
    return StoredTensor(spec, lambda: stored.load().to(dtype))


def shape_of(value: Any, where: str) -> tuple[int, ...]:
    """A shape as the file has it.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(value, (tuple, list)) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{where}: {value!r} is no shape")
    return tuple(value)
