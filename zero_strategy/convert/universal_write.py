"""DeepSpeed's universal checkpoints written, for `"checkpoint": {"load_universal": true}`.

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
"""

from __future__ import annotations

import uuid
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.disk import all_beside, beside, remove, replace_directory, replace_file, sync
from zero_strategy.checkpoint.layout import TensorSpec, check_file_name
from zero_strategy.checkpoint.manifest import Scalar
from zero_strategy.convert.deepspeed_model import OWN_KEYS
from zero_strategy.convert.megatron import MergeRules, Rule
from zero_strategy.convert.portable import PortableOptimizer, PortableState, Progress, StoredTensor, loaded
from zero_strategy.convert.torch_file import foreign, save

LATEST_NAME = "latest_universal"
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""For stages 1 and 2, and for stage 3."""
INFO_VERSION = 0.4
DS_VERSION = "0.19.8"
"""The DeepSpeed whose layout this is; its loader asks for the version of the writer."""

GLOBAL_NAME = "optimizer_state.pt"
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
        save(_optimizer_state(state, optimizer, steps), temporary / "zero" / GLOBAL_NAME)
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
            if name not in state.weights or name in seen or name == GLOBAL_NAME:
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
