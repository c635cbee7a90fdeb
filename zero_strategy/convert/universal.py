"""DeepSpeed's universal checkpoints read, in both layouts; `universal_write` has what they look like.

`read` gives the weights that DeepSpeed would have after loading: the fp32 tensors, cast. Where the model file holds
the weights, too, both are compared: DeepSpeed's converter gets parameters wrong if the run had
`round_robin_gradients`, and nothing else in its output tells. Frozen parameters and buffers come from the model
files, merged by the rules of `convert/megatron.py` where several tensor-parallel ranks wrote them. A pipeline's model
files hold no tensors and its layer files are not part of a universal checkpoint: buffers and frozen parameters are
not in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.layout import TensorSpec, check_file_name
from zero_strategy.checkpoint.manifest import Scalar
from zero_strategy.convert.deepspeed import DeepSpeedDirectory
from zero_strategy.convert.deepspeed_model import OWN_KEYS, loss_scaler_state, plain
from zero_strategy.convert.megatron import MergeRules, Rule, merge
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import PortableOptimizer, PortableState, StoredTensor
from zero_strategy.convert.universal_write import GLOBAL_NAME, LATEST_NAME, write
from zero_strategy.runtime.regular_files import is_there, read_text

__all__ = ["detect", "read", "write"]

_STEP = "step.pt"
_FP32 = "fp32"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def locate(path: Path) -> Path | None:
    """The directory of a universal checkpoint: the path itself, or the one that `latest_universal` in it names."""
    if is_there(path / "zero" / GLOBAL_NAME):
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
        raise ValueError(f"{path}: is no universal checkpoint: it has neither zero/{GLOBAL_NAME} nor {LATEST_NAME}")
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
        self.shared: dict[str, Any] = _mapping(directory / "zero" / GLOBAL_NAME)
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
                f"{self.directory}: zero/{GLOBAL_NAME} has {len(hyper)} param groups, the model files "
                f"{len(self.groups)}"
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
                return _scalar(value, self.directory / "zero" / GLOBAL_NAME)
        groups = self.shared.get("param_groups") or []
        if group < len(groups) and groups[group].get("step") is not None:
            return _scalar(groups[group]["step"], self.directory / "zero" / GLOBAL_NAME)
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
