"""DeepSpeed's universal checkpoints: written for `"checkpoint": {"load_universal": true}`, and read in both layouts.

    <root>/latest_universal                                 name of the directory
    <root>/<directory>/zero/<parameter>/fp32.pt             {"param": full tensor, "cat_dim": 0}
                                       /exp_avg.pt ...      the same, one per kind of state
                                       /step.pt             number of steps
                       zero/optimizer_state.pt              hyper-parameters, loss scale
                       mp_rank_00_model_states.pt           counters, client state, shapes; read at stages 1 and 2
                       zero_pp_rank_0_mp_rank_00_model_...  the same without tensors; read at stage 3

DeepSpeed's own converter writes one layout for stages 1 and 2 and another for stage 3 (bare flat tensors, no
`step.pt`), which do not load each other's; `write` gives one that both loaders accept. Three things follow from how
the loader at stage 3 goes about it:

- It gives all groups the hyper-parameters of the first. It is shown only those on which all groups agree; the others
  stay as that run's config has them.
- It takes one step count for all, and where that is a tensor, as torch's optimizers have it, all groups share that
  tensor and each counts it up. With several groups it is written as a number, as DeepSpeed's own optimizers have it;
  torch's then refuse to step, instead of stepping with wrong counts.
- It knows the moments of Adam only.

What the format cannot hold is refused: several optimizers, state that is not one value per element, step counts that
differ inside a group. A parameter that was never updated gets moments of zeros and its group's step count, as
DeepSpeed's flat groups have it. How tensor-parallel runs divide parameters goes along if the state came from one
(`state.user["deepspeed"]["universal_checkpoint_info"]`).

`read` gives the weights that DeepSpeed would have after loading: the fp32 tensors, cast. Where the model file holds
the weights, too, both are compared: DeepSpeed's converter gets parameters wrong if the run had
`round_robin_gradients`, and nothing else in its output tells. Frozen parameters and buffers come from the model
files, merged by the rules of `convert/megatron.py` where several tensor-parallel ranks wrote them. A pipeline's model
files hold no tensors and its layer files are not part of a universal checkpoint: buffers and frozen parameters are
not in it.
"""

from __future__ import annotations

import re
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.disk import all_beside, beside, remove, replace_directory, replace_file, sync
from zero_strategy.checkpoint.layout import TensorSpec, check_file_name
from zero_strategy.checkpoint.manifest import Scalar
from zero_strategy.convert.deepspeed import DeepSpeedDirectory
from zero_strategy.convert.deepspeed_model import OWN_KEYS, loss_scaler_state, plain
from zero_strategy.convert.megatron import MergeRules, Rule, merge
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import PortableOptimizer, PortableState, Progress, StoredTensor, loaded
from zero_strategy.convert.torch_file import foreign, save
from zero_strategy.runtime.regular_files import is_there, read_text

__all__ = ["detect", "read", "write"]

LATEST_NAME = "latest_universal"
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""For stages 1 and 2, and for stage 3."""
INFO_VERSION = 0.4
DS_VERSION = "0.19.8"
"""The DeepSpeed whose layout this is; its loader asks for the version of the writer."""

_GLOBAL_NAME = "optimizer_state.pt"
_OWN_KINDS = ("fp32", "step")
"""Beside those of the state in a parameter's folder, and no kinds of state."""

SUB_GROUP = 1_000_000_000
"""Elements from which on stage 3 divides a group by default (`sub_group_size`)."""


def write(state: PortableState, path: Path, *, progress: Progress | None = None) -> None:
    """Writes a universal checkpoint, atomically; one process does it, with one tensor in memory at a time.

    Args:
        state: What to write. Frozen parameters and buffers go into the model file, from which DeepSpeed does not
            restore them when it loads a universal checkpoint.
        path: The directory of one tag; `latest_universal` beside it will name it.
        progress: Is told of the bytes written.

    Raises:
        ValueError: If the format cannot hold the state, naming the parameter or key, or the target exists and is no
            universal checkpoint.
        OSError: If the file system fails. The target is then as it was.
    """
    optimizer = _only_optimizer(state)
    _check_client_state(state.client_state)
    rules = MergeRules.from_info(info_of(state))
    steps = [_step_of(optimizer, number, group) for number, group in enumerate(optimizer.param_groups)]
    target = path.absolute()
    if target.exists() and not (target / "zero").is_dir() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is no universal checkpoint; it will not be overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex[:12]
    temporary = beside(target, token, "tmp")
    try:
        (temporary / "zero").mkdir(parents=True)
        for step, group in zip(steps, optimizer.param_groups, strict=True):
            for name in group["params"]:
                folder, layout = temporary / "zero" / name, _layout(rules.rule(name))
                _write_parameter(folder, name, state, optimizer, group["params"], step, layout, progress)
        save(_optimizer_state(state, optimizer, steps), temporary / "zero" / _GLOBAL_NAME)
        for file in MODEL_FILES:
            torch.save(_model_states(state, optimizer, tensors=file == MODEL_FILES[0]), temporary / file)
        _sync_tree(temporary)
        replace_directory(temporary, target, beside(target, token, "old"))
    except BaseException:
        remove(temporary)
        raise
    for stale in all_beside(target, "old"):
        remove(stale)
    replace_file(target.parent / LATEST_NAME, target.name.encode())


def info_of(state: PortableState) -> dict[str, Any]:
    """`universal_checkpoint_info` of the DeepSpeed run that a state came from, or nothing."""
    found = state.user.get("deepspeed", {})
    return dict(found.get("universal_checkpoint_info") or {}) if isinstance(found, Mapping) else {}


def _only_optimizer(state: PortableState) -> PortableOptimizer:
    if len(state.optimizers) != 1:
        raise ValueError(
            f"the checkpoint has {len(state.optimizers)} optimizers; DeepSpeed has exactly one, and its universal "
            "checkpoints are optimizer state"
        )
    optimizer = state.optimizers[0]
    seen: set[str] = set()
    for group in optimizer.param_groups:
        for name in group["params"]:
            check_file_name(name, "parameter")
            if name not in state.weights or name in seen or name == _GLOBAL_NAME:
                raise ValueError(
                    f"parameter {name!r} of a param group is no weight, is in two groups, or has the name of a file"
                )
            seen.add(name)
    for kind, tensors in optimizer.kinds.items():
        check_file_name(kind, "state", ".pt")
        if kind in _OWN_KINDS:
            raise ValueError(f"state {kind!r} has the name of another file of a parameter's: rename it")
        for name, tensor in tensors.items():
            if name not in seen or tensor.spec.shape != state.weights[name].spec.shape:
                raise ValueError(
                    f"state {kind!r} of parameter {name!r} has the shape {tensor.spec.shape}; DeepSpeed's flat state "
                    "has one value per element of a parameter in a group"
                )
    return optimizer


def _check_client_state(client_state: Mapping[str, Any]) -> None:
    if clash := sorted(OWN_KEYS & client_state.keys()):
        raise ValueError(f"client state has the keys {clash}, under which DeepSpeed keeps its own state; rename them")


def _step_of(optimizer: PortableOptimizer, number: int, group: Mapping[str, Any]) -> Scalar:
    """The step count of a group; None if nothing in it was ever updated."""
    steps: dict[Scalar, str] = {}
    without = []
    for name in group["params"]:
        scalars = optimizer.scalars.get(name, {})
        for key, value in scalars.items():
            if key != "step" and value is not None:
                raise ValueError(f"state {key!r} of parameter {name!r} is a number, which the format cannot hold")
        if "step" in scalars:
            steps.setdefault(scalars["step"], name)
        else:
            without.append(name)
    if len(steps) > 1:
        raise ValueError(
            f"parameters of group {number} were updated a different number of times ({steps}); DeepSpeed has one step "
            "count per group. Give them groups of their own"
        )
    step = next(iter(steps), None)
    if without and step is not None:
        warnings.warn(
            f"{len(without)} parameters of group {number} were never updated ({without[:3]}...): they get zero moments "
            f"and the group's step count {step}, as DeepSpeed has it",
            stacklevel=3,
        )
    return step


def _write_parameter(
    directory: Path,
    name: str,
    state: PortableState,
    optimizer: PortableOptimizer,
    group: Iterable[str],
    step: Scalar,
    layout: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"parameter {name!r} and another one have names that are one to this file system") from None
    weight = state.weights[name]
    # All parameters of a group must have the same kinds, or DeepSpeed stops at the one that lacks one.
    kinds = [kind for kind, tensors in optimizer.kinds.items() if kind != "master" and tensors.keys() & set(group)]
    sources = {"fp32": optimizer.kinds.get("master", {}).get(name, weight)}
    sources |= {kind: optimizer.kinds[kind].get(name) or _zeros(name, weight) for kind in kinds}
    for kind, tensor in sources.items():
        value = loaded(tensor).float().contiguous()
        if value.untyped_storage().nbytes() != value.nbytes:
            value = value.clone()  # torch.save writes whole storages
        save({"param": value, **layout}, directory / f"{kind}.pt")
        if progress is not None:
            progress(tensor.spec.nbytes)
    if step is not None:
        torch.save(_step_value(optimizer, step), directory / "step.pt")


def _zeros(name: str, weight: StoredTensor) -> StoredTensor:
    spec = TensorSpec(name, torch.float32, weight.spec.shape)
    return StoredTensor(spec, lambda: torch.zeros(spec.shape))


def _layout(rule: Rule) -> dict[str, Any]:
    """Division of a parameter for a run with tensor parallelism; of no effect in one without."""
    made: dict[str, Any] = {}
    if rule.sub_params is not None:
        shape = rule.sub_params.shape
        fields: dict[str, Any] = {"patterns": list(rule.sub_params.patterns), "shape": shape}
        fields["partition_dim"] = rule.sub_params.partition_dim
        made["sub_param_shape"] = foreign("deepspeed.checkpoint.universal_checkpoint.SubparamShape", fields)
    elif rule.dim is not None:
        made["cat_dim"] = rule.dim
    if rule.kind == "halves":
        made["param_n_sub_params"] = 2
    if rule.vocabulary_size is not None:
        made["vocab_tensor"] = True
    return made


def _step_value(optimizer: PortableOptimizer, step: Scalar, *, number: bool = False) -> Any:
    """A 0-d tensor, as torch's optimizers have it, if it was one; else a number, as DeepSpeed's have it."""
    dtype = optimizer.scalar_dtypes.get("step")
    return step if dtype is None or number else torch.tensor(step, dtype=getattr(torch, dtype))


def _optimizer_state(state: PortableState, optimizer: PortableOptimizer, steps: list[Scalar]) -> dict[str, Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    common = {
        key: value
        for key, value in (groups[0].items() if groups else ())
        if all(key in group and group[key] == value for group in groups)
    }
    taken = [step for step in steps if step is not None]
    if len(set(taken)) > 1:
        warnings.warn(
            f"param groups have the step counts {taken}; DeepSpeed at ZeRO stage 3 will take {max(taken)} for all",
            stacklevel=3,
        )
    shared = len(groups) > 1 or _elements(state, optimizer) > SUB_GROUP
    step = _step_value(optimizer, max(taken, default=0), number=shared)
    made: dict[str, Any] = {
        "ds_version": DS_VERSION,
        "param_groups": [{**group, "params": [number]} for number, group in enumerate(groups)],
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [common]},
    }
    if state.loss_scaler is not None:
        made["loss_scaler"] = _scaler(state.loss_scaler)
        made["dynamic_loss_scale"] = True
    return made


def _elements(state: PortableState, optimizer: PortableOptimizer) -> int:
    return sum(state.weights[name].spec.numel for group in optimizer.param_groups for name in group["params"])


def _scaler(scaler: Mapping[str, Any]) -> Any:
    """DeepSpeed's scaler, with its default window and minimum; hysteresis, if the run had any, is its default."""
    tolerated = int(scaler.get("until_lower", 0))
    attributes = {
        "cur_scale": float(scaler["scale"]),
        "dynamic": True,
        "cur_iter": int(scaler.get("good_steps", 0)) + 1,  # the next step's number, of which none has overflowed
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_scale": 1,
        "delayed_shift": max(2, tolerated) if tolerated else 1,
        "cur_hysteresis": tolerated or 1,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dtype": torch.half,
    }
    return foreign("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", attributes)


def _model_states(state: PortableState, optimizer: PortableOptimizer, *, tensors: bool) -> dict[str, Any]:
    """The model file: what is under `zero/` is an empty tensor of the right dtype in it, as DeepSpeed has it."""
    names = {name for group in optimizer.param_groups for name in group["params"]}
    module: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, tensor in state.weights.items():
        if name in names or not tensors:
            module[name] = torch.empty(0, dtype=tensor.spec.dtype)
        else:
            module[name] = loaded(tensor).clone()
    counters = {key: int(state.counters.get(key) or 0) for key in ("global_steps", "global_samples", "skipped_steps")}
    precision = {state.weights[name].spec.dtype for name in names}
    return {
        **state.client_state,
        **counters,
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, torch.Size(state.weights[name].spec.shape)) for name in group["params"])
            for group in optimizer.param_groups
        ],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(state.aliases),
        "lr_scheduler": state.lr_scheduler,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "universal_checkpoint_info": {"universal_checkpoint_version": INFO_VERSION, **info_of(state)},
        "ds_config": {
            "bf16": {"enabled": precision == {torch.bfloat16}},
            "fp16": {"enabled": precision == {torch.float16}},
        },
        "ds_version": DS_VERSION,
    }


def _sync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        sync(path)
    sync(directory)


_GLOBAL = "optimizer_state.pt"
_STEP = "step.pt"
_FP32 = "fp32"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def locate(path: Path) -> Path | None:
    """The directory of a universal checkpoint: the path itself, or the one that `latest_universal` in it names."""
    if is_there(path / "zero" / _GLOBAL):
        return path
    latest = path / LATEST_NAME
    if is_there(latest):
        name = read_text(latest).strip()
        check_file_name(name, f"{latest}:")
        return path / name if (path / name / "zero").is_dir() else None
    return None


def detect(path: Path) -> bool:
    """True if there is a universal checkpoint. In a directory with a `latest`, too, that one counts."""
    return locate(path) is not None and ((path / "zero").is_dir() or not is_there(path / "latest"))


def read(path: Path, *, weights_only: bool = False, compare: bool = True) -> PortableState:
    """Opens a universal checkpoint; tensors are read when they are asked for.

    Args:
        path: Its directory, or the one with `latest_universal`.
        weights_only: Leave the optimizer and the loss scale out.
        compare: Compare fp32 weights with those of the model file, where it has them, when a weight is loaded.

    Returns:
        The state.

    Raises:
        ValueError: Naming the file and what is wrong with it.
    """
    directory = locate(path)
    if directory is None:
        raise ValueError(f"{path}: is no universal checkpoint: it has neither zero/{_GLOBAL} nor {LATEST_NAME}")
    state = _Universal(directory, compare).state()
    if weights_only:
        state.optimizers, state.loss_scaler = [], None
    return state


class _Universal:
    def __init__(self, directory: Path, compare: bool) -> None:
        self.directory = directory
        self.compare = compare
        self.files = DeepSpeedDirectory(directory)
        self.degrees = self.files.degrees
        self.shared: dict[str, Any] = _mapping(directory / "zero" / _GLOBAL)
        self.models = {mp: _mapping(self.files.first_model_file(mp)) for mp in self.files.mp_ranks}
        self.first = self.models[0]
        self.rules = MergeRules.from_info(self.first.get("universal_checkpoint_info"))
        self.at_stage3 = not self.files.model_files
        self.groups = self._groups()

    def state(self) -> PortableState:
        weights = self._weights()
        counters = {key: int(self.first[key]) for key in _COUNTERS if self.first.get(key) is not None}
        info = plain(self.first.get("universal_checkpoint_info") or {})
        return PortableState(
            weights=weights,
            user={"deepspeed": {"universal_checkpoint_info": info}},
            aliases=self._aliases(weights),
            optimizers=[self._optimizer(weights)],
            counters=dict(counters),
            loss_scaler=loss_scaler_state(self.shared.get("loss_scaler"), counters.get("skipped_steps", 0)),
            client_state={key: plain(value) for key, value in self.first.items() if key not in OWN_KEYS},
            lr_scheduler=plain(self.first.get("lr_scheduler")),
        )

    # ---- which parameters there are ----

    def _groups(self) -> list[dict[str, tuple[int, ...]]]:
        """Name -> shape on one tensor-parallel rank, of each param group, over all pipeline stages."""
        per_rank = [self._groups_of(model) for model in self.models.values()]
        for name in (name for groups in per_rank for shapes in groups for name in shapes):
            check_file_name(name, f"{self.directory}: parameter")
        count = max(map(len, per_rank))
        groups: list[dict[str, tuple[int, ...]]] = [{} for _ in range(count)]
        for shapes in per_rank:
            for group, named in zip(groups, shapes):
                for name, shape in named.items():
                    group.setdefault(name, shape)
        return groups

    def _groups_of(self, model: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
        shapes = model.get("param_shapes")
        if not isinstance(shapes, (list, tuple)):
            raise ValueError(f"{self.directory}: a model file has no param_shapes, which tell the param groups")
        named = [{name: tuple(shape) for name, shape in group.items()} for group in shapes]
        groups = self.shared.get("param_groups", [])
        if not self.at_stage3 or len(named) == len(groups):
            return named
        # At stage 3 the shapes are those of sub-groups, whose numbers are the "params" of the groups.
        numbers = [list(group.get("params", [])) for group in groups]
        if sorted(number for group in numbers for number in group) != list(range(len(named))):
            if len(groups) != 1:
                raise ValueError(
                    f"{self.directory}: the param groups name sub-groups {numbers}, but the model file has {len(named)}"
                )
            numbers = [list(range(len(named)))]
        return [{name: shape for number in group for name, shape in named[number].items()} for group in numbers]

    def _aliases(self, weights: Mapping[str, StoredTensor]) -> dict[str, str]:
        aliases: dict[str, str] = {}
        for model in self.models.values():
            aliases |= {a: name for a, name in (model.get("shared_params") or {}).items() if name in weights}
        return {alias: name for alias, name in aliases.items() if alias not in weights}

    # ---- weights ----

    def _weights(self) -> dict[str, StoredTensor]:
        trained = {name: shape for group in self.groups for name, shape in group.items()}
        shared = {alias for model in self.models.values() for alias in model.get("shared_params") or {}}
        order = [name for name in self.first.get("module") or {} if name not in shared]
        known = set(order) | shared
        order += [name for name in _natural(trained) if name not in known]
        weights: dict[str, StoredTensor] = {}
        for name in order:
            weights[name] = self._trained_weight(name, trained[name]) if name in trained else self._other(name)
        return weights

    def _trained_weight(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._stored(name, _FP32, shape)
        dtype = self._dtype_of(name)
        module = self._module_tensors(name)
        rule = self.rules.rule(name)

        def load() -> torch.Tensor:
            value = stored.load().to(dtype)
            if self.compare and module and rule.kind != "average":
                held = merge(name, module, rule)
                if held.shape != value.shape or not _same(held, value):
                    raise ValueError(
                        f"{self.directory}: parameter {name!r} has other values in zero/{name}/{_FP32}.pt than in the "
                        "model file. DeepSpeed's converter mixes parameters up if the run had round_robin_gradients; "
                        "convert the original checkpoint instead (--from deepspeed), or read with compare=False"
                    )
            return value

        return StoredTensor(TensorSpec(name, dtype, stored.spec.shape), load)

    def _module_tensors(self, name: str) -> list[torch.Tensor]:
        """The ranks' weights in the model files; none at stage 3, in pipelines and where they were left out."""
        if self.degrees.pp > 1:
            return []
        found = [(model.get("module") or {}).get(name) for model in self.models.values()]
        held = [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
        return held if len(held) == len(found) and any(tensor.numel() for tensor in held) else []

    def _dtype_of(self, name: str) -> torch.dtype:
        for model in self.models.values():
            tensor = (model.get("module") or {}).get(name)
            if isinstance(tensor, torch.Tensor):
                return tensor.dtype
        config = self.first.get("ds_config") or {}
        for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
            if isinstance(config, Mapping) and (config.get(key) or {}).get("enabled"):
                return dtype
        return torch.float32

    def _other(self, name: str) -> StoredTensor:
        """A frozen parameter or a buffer."""
        frozen = self.first.get("frozen_param_shapes") or {}
        if self.at_stage3 and name in frozen:
            return self._frozen_at_stage3(name, tuple(frozen[name]))
        tensors = [model["module"][name] for model in self.models.values() if name in (model.get("module") or {})]
        if self.at_stage3 and not tensors[0].numel() and name not in (self.first.get("buffer_names") or []):
            raise ValueError(
                f"{self.directory}: parameter {name!r} is a placeholder in the model file, and neither in zero/ nor "
                "among the frozen parameters"
            )
        whole_copies = name in (self.first.get("buffer_names") or [])
        rule = Rule("replicated") if whole_copies else self.rules.rule(name)
        if len(tensors) == 1 and rule.vocabulary_size is None:
            return StoredTensor.of(name, tensors[0])
        whole = merge(name, tensors, rule)
        return StoredTensor(TensorSpec.of(name, whole), lambda: merge(name, tensors, rule))

    def _frozen_at_stage3(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        if self.degrees.tp > 1:
            raise ValueError(
                f"{self.directory}: frozen parameter {name!r} of a tensor-parallel run at stage 3 cannot be read"
            )
        numel = torch.Size(shape).numel()
        dtype = self.first["frozen_param_fragments"][name].dtype

        def load() -> torch.Tensor:
            files = [self.files.stage3_files[dp, 0] for dp in range(self.degrees.dp)]
            parts = [_mapping(file)["frozen_param_fragments"][name] for file in files]
            return torch.cat(parts)[:numel].view(shape)

        return StoredTensor(TensorSpec(name, dtype, shape), load)

    # ---- the optimizer ----

    def _optimizer(self, weights: Mapping[str, StoredTensor]) -> PortableOptimizer:
        made = PortableOptimizer()
        trained = {name: shape for group in self.groups for name, shape in group.items()}
        for name in (name for name in weights if name in trained):
            for kind in self._kinds(name):
                if kind != _FP32:
                    made.kinds.setdefault(kind, {})[name] = self._stored(name, kind, trained[name])
                elif weights[name].spec.dtype != torch.float32:
                    made.kinds.setdefault("master", {})[name] = self._stored(name, kind, trained[name])
        for number, group in enumerate(self.groups):
            for name in group:
                if (step := self._step(name, number)) is not None:
                    value, dtype = step
                    made.scalars[name] = {"step": value}
                    if dtype is not None:
                        made.scalar_dtypes["step"] = dtype
        hyper = self.shared.get("param_groups") or [{} for _ in self.groups]
        if len(hyper) != len(self.groups):
            raise ValueError(
                f"{self.directory}: zero/{_GLOBAL} has {len(hyper)} param groups, the model files {len(self.groups)}"
            )
        made.param_groups = [
            {key: _plain(value) for key, value in values.items() if key not in ("params", "step")}
            | {"params": [*group]}
            for values, group in zip(hyper, self.groups, strict=True)
        ]
        return made

    def _kinds(self, name: str) -> list[str]:
        folder = self.directory / "zero" / name
        return sorted(file.stem for file in folder.glob("*.pt") if file.name != _STEP)

    def _stored(self, name: str, kind: str, shape: tuple[int, ...]) -> StoredTensor:
        """A full tensor under `zero/`; `shape` is that of a shard."""
        file = self.directory / "zero" / name / f"{kind}.pt"
        if not is_there(file):
            raise ValueError(f"{self.directory}: parameter {name!r} has no {kind}.pt in zero/{name}")
        value = _tensor(file)
        flat = value.dim() == 1 and len(shape) != 1
        whole = shape if flat else tuple(value.shape)
        if torch.Size(whole).numel() != value.numel() or (self.degrees.tp == 1 and not self._fits(name, whole, shape)):
            raise ValueError(f"{file}: has the shape {tuple(value.shape)}, parameter {name!r} has {shape}")
        load: Callable[[], torch.Tensor] = lambda: _tensor(file).view(whole)  # noqa: E731
        return StoredTensor(TensorSpec(name, value.dtype, whole), load)

    def _fits(self, name: str, whole: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        size = self.rules.rule(name).vocabulary_size
        return whole == (shape if size is None else (size, *shape[1:]))

    def _step(self, name: str, group: int) -> tuple[Scalar, str | None] | None:
        file = self.directory / "zero" / name / _STEP
        if is_there(file):
            return _scalar(load_restricted(file), file)
        inner = self.shared.get("optimizer_state_dict") or {}
        states = inner.get("state") or {}
        for value in (states.get(group, {}).get("step"), states.get(0, {}).get("step")):
            if value is not None:
                return _scalar(value, self.directory / "zero" / _GLOBAL)
        groups = self.shared.get("param_groups") or []
        if group < len(groups) and groups[group].get("step") is not None:
            return _scalar(groups[group]["step"], self.directory / "zero" / _GLOBAL)
        return None


def _mapping(file: Path) -> dict[str, Any]:
    loaded = load_restricted(file)
    if not isinstance(loaded, dict):
        raise ValueError(f"{file}: holds a {type(loaded).__name__}, not a dict")
    return loaded


def _tensor(file: Path) -> torch.Tensor:
    loaded = load_restricted(file)
    value = loaded.get("param") if isinstance(loaded, dict) else loaded
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{file}: holds neither a tensor nor a dict with one under 'param'")
    return value


def _scalar(value: Any, file: Path) -> tuple[Scalar, str | None]:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{file}: the step count is a tensor of shape {tuple(value.shape)}")
        return value.item(), str(value.dtype).removeprefix("torch.")
    if not isinstance(value, (int, float)):
        raise ValueError(f"{file}: the step count is {value!r}")
    return value, None


def _plain(value: Any) -> Any:
    return (value.item() if value.numel() == 1 else value.tolist()) if isinstance(value, torch.Tensor) else value


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def _natural(names: Mapping[str, object]) -> list[str]:
    """Sorted so that layer 10 comes after layer 9."""

    def key(name: str) -> list[tuple[bool, int, str]]:
        parts = re.split(r"(\d+)", name)
        return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]

    return sorted(names, key=key)
