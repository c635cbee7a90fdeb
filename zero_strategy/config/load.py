"""Loading one `ZeroConfig` from all its sources: every key is checked and keeps its origin; Hydra's group.

    defaults:
      - zero: zero3        # after zero_strategy.config.register_hydra()

    python train.py zero=zero2 zero.prefetch=2
    strategy = ZeroStrategy(config.zero)

`ZeroSettings` has the settings as keywords of a constructor: written once, for the strategies that take them beside
their own. Type checkers read the types, and jsonargparse (LightningCLI) reads the types and, for its help, the
docstring:

    def __init__(self, config=None, **settings: Unpack[ZeroSettings]) -> None: ...
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypedDict, TypeVar

from zero_strategy.config.deepspeed.classify import read_base64, read_json_file
from zero_strategy.config.deepspeed.read import is_deepspeed, read_deepspeed
from zero_strategy.config.deepspeed.settings import DeepSpeedSettings
from zero_strategy.config.schema import (
    ActivationCheckpointingConfig,
    AutoConfig,
    CheckpointConfig,
    CommunicationConfig,
    DiagnosticsConfig,
    LossScaleConfig,
    MeshConfig,
    OffloadConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    ReproducibleConfig,
    SurviveConfig,
    UnitsConfig,
    WatchdogConfig,
    ZeroConfig,
)
from zero_strategy.config.section import (
    ACCEPTS,
    DEFAULT,
    Section,
    Setting,
    check_value,
    default_of,
    from_origin,
    is_section,
    typed_fields,
    wrong_type,
)
from zero_strategy.config.sources import (
    DEEPSPEED_KEY,
    NVME_PATH,
    Layer,
    deepspeed_key,
    is_removed,
    nvme_paths,
    owned_key,
    plain,
    read_file,
    read_mapping,
    unknown_key,
)

S = TypeVar("S", bound=Section)

FORMER_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "guard": "watchdog",
        "release_after_backward": "reshard_after_backward",
        "release_after_forward": "reshard_after_forward",
        "rendezvous_seconds": "barrier_seconds",
    }
)
"""Former names of settings, which configs and keywords may go on using."""

AUTO = "auto"
"""In place of a stage: it is chosen."""
_OFFLOADED_AS = "derived: offload: "
"""What origins of the other settings begin with that a single value of `offload` stands for."""

ConfigSource = ZeroConfig | Mapping[str, Any] | str | os.PathLike[str]
"""What `load_config` reads. A DictConfig is a Mapping."""


class ZeroSettings(TypedDict, total=False):
    """The fields of `ZeroConfig`, each with the short forms that `load_config` takes; None is not given.

    Args:
        stage: ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters; "auto": see `auto`.
        units: What is sharded, gathered and released together.
        mesh: How the ranks are laid out, for hybrid sharding and tensor parallelism.
        communication: What ranks send each other.
        precision: Dtypes of master weights and gradients. (That of the computation is the framework's `precision`.)
        optimizer: In what form states of optimizers are kept: `{"state_bits": 8}`.
        gradient_reduction: `per_step` or `per_micro_batch`.
        uneven_batches: Ranks that run out of batches before others: `error`, `join` or `join_active`.
        prefetch: Units that are gathered ahead under stage 3.
        reshard_after_forward: Free gathered parameters between forward and backward under stage 3.
        reshard_after_backward: Free them after backward under stage 3 (else after the optimizer's step).
        broadcast_buffers: Keep buffers equal to rank 0's, as DistributedDataParallel does.
        loss_scale: Dynamic loss scaling for fp16.
        nonfinite_gradients: What a step does whose gradients are not finite: `ignore`, `skip` or `raise`.
        offload: Where state is kept that the device has no room for: "cpu", "nvme", or more.
        activation_checkpointing: Which activations are computed again in backward instead of being kept: "full",
            "selective", "every_n", "budget", or more.
        pipeline: How the layers of a model are divided into pipeline stages.
        checkpoint: How checkpoints are written.
        watchdog: How ranks notice that one has failed or does something else: "off", "default", "strict", or more.
        diagnostics: What is written down of a run.
        reproducible: Micro-batches of a step, over all ranks, so that bits do not depend on the ranks: 8, or more.
        survive: Go on with the processes that are left when some die.
        auto: Choose what nobody has set, for the model, the ranks and the memory that there is; also `stage="auto"`.
        elementwise_optimizers: Class names of your own optimizers that may run on pieces of parameters.
        matrix_optimizers: Class names of optimizers that need whole matrices, such as Shampoo.
        matrix_parameters: Patterns of the names of matrices that share buckets with each other alone; default: none,
            or with matrix_optimizers those of units below the root.
        fused_optimizers: Take the steps of torch's Adam, AdamW, SGD and Adagrad in the fused ops.
        mmap_threshold: Bytes from which a block of host memory is mapped on its own; 0: as glibc decides.
        timeout_seconds: Seconds until a collective times out.
        barrier_seconds: Seconds that our own waits on other ranks last at most.
    """

    stage: int | Literal["auto"] | None
    units: UnitsConfig | dict[str, Any] | None
    mesh: MeshConfig | dict[str, Any] | None
    communication: CommunicationConfig | dict[str, Any] | None
    precision: PrecisionConfig | dict[str, Any] | None
    optimizer: OptimizerConfig | dict[str, Any] | None
    gradient_reduction: str | None
    uneven_batches: str | None
    prefetch: int | None
    reshard_after_forward: bool | None
    reshard_after_backward: bool | None
    broadcast_buffers: bool | None
    loss_scale: LossScaleConfig | dict[str, Any] | None
    nonfinite_gradients: str | None
    offload: OffloadConfig | dict[str, Any] | str | None
    activation_checkpointing: ActivationCheckpointingConfig | dict[str, Any] | bool | str | None
    pipeline: PipelineConfig | dict[str, Any] | None
    checkpoint: CheckpointConfig | dict[str, Any] | None
    watchdog: WatchdogConfig | dict[str, Any] | str | None
    diagnostics: DiagnosticsConfig | dict[str, Any] | None
    reproducible: ReproducibleConfig | dict[str, Any] | int | None
    survive: SurviveConfig | dict[str, Any] | bool | None
    auto: AutoConfig | dict[str, Any] | bool | None
    elementwise_optimizers: list[str] | None
    matrix_optimizers: list[str] | None
    matrix_parameters: list[str] | None
    fused_optimizers: bool | None
    mmap_threshold: int | None
    timeout_seconds: float | None
    barrier_seconds: float | None


def load_config(source: ConfigSource | None = None, **overrides: Any) -> ZeroConfig:
    """Reads a config, ours or DeepSpeed's JSON, and puts keyword overrides of ours on top of it.

    Nested mappings merge key by key, lists are replaced as a whole:

        load_config("zero.yaml", stage=2, mesh={"replicate": 2})

    Args:
        source: A `ZeroConfig`, a mapping, an OmegaConf DictConfig (as from Hydra), or the path of a YAML
            or JSON file; also base64 of JSON. None starts from the defaults. With keys of DeepSpeed's JSON it is read
            as such, see `ZeroConfig.deepspeed`.
        **overrides: Settings that win over the source. A section is a mapping, or an instance of its
            dataclass, which replaces the section as a whole.

    Returns:
        A new config. `ZeroConfig.explain` shows where each value came from.

    Raises:
        FileNotFoundError: If the file does not exist.
        TypeError: If a value is not of its declared type. Nothing is converted, except int to float.
        ValueError: If a key is unknown or owned by a framework, a value is not accepted, or keys of DeepSpeed's
            JSON stand among ours.
    """
    settings: dict[str, Setting] = {}
    deepspeed: DeepSpeedSettings | None = None
    if isinstance(source, ZeroConfig):
        source.check()
        settings.update(source.settings())
        deepspeed = source.deepspeed
    elif source is not None:
        layer = read_layer(source)
        if layer.is_deepspeed:
            deepspeed = read_deepspeed(layer)
            settings.update(deepspeed.zero)
        else:
            settings.update(_settings(layer))
    settings.update(_settings(Layer(overrides, "user: keyword")))
    config = _build_config(settings)
    config._deepspeed = deepspeed
    return config


def load_layers(layers: Iterable[Layer]) -> ZeroConfig:
    """Merges layers that name their own origin; later ones win.

    This is for the frameworks' integrations, which read settings at places of their own:

        load_layers([Layer(preset("zero2"), 'Trainer(strategy="zero2")'), Layer(keywords, "user: keyword")])
    """
    settings: dict[str, Setting] = {}
    for layer in layers:
        settings.update(_settings(layer))
    return _build_config(settings)


def config_of(settings: DeepSpeedSettings) -> ZeroConfig:
    """The config that a DeepSpeed JSON leads to."""
    config = _build(ZeroConfig, settings.zero)
    config._deepspeed = settings
    return config


def read_layer(source: Any) -> Layer:
    """Reads a source of any kind but a `ZeroConfig`, and finds out whether it is DeepSpeed's."""
    layer = _read(source)
    return layer._replace(is_deepspeed=is_deepspeed(layer.values, layer.origin))


def _read(source: Any) -> Layer:
    if isinstance(source, Mapping):
        return read_mapping(source)
    if isinstance(source, (str, os.PathLike)):
        encoded = None if os.path.exists(source) else read_base64(source)
        if encoded is not None:
            return encoded
        is_json = os.fspath(source).endswith(".json") and os.path.exists(source)
        return _read_json(source) if is_json else read_file(source)
    expected = "a ZeroConfig, a mapping, a DictConfig or the path of a YAML or JSON file"
    raise TypeError(wrong_type("config", source, expected, None))


def _read_json(source: str | os.PathLike[str]) -> Layer:
    # DeepSpeed's files may have comments; ours are read as YAML, of which JSON is a part, with its interpolations.
    layer = read_json_file(source)
    return layer if is_deepspeed(layer.values, layer.origin) else read_file(source)


def _settings(layer: Layer) -> Iterator[tuple[str, Setting]]:
    """Yields the checked settings of a layer under their full keys."""
    if DEEPSPEED_KEY in layer.values:
        # Said first: the other keys of such a file would each get an error of their own.
        raise ValueError(deepspeed_key(layer.origin))
    yield from _walk(layer.values, ZeroConfig, layer)
    if layer.values.get("stage") == AUTO:  # last, since a whole section beside it says its default
        if layer.values.get("auto") is False:
            raise ValueError(f"stage is 'auto', and auto is False{from_origin(layer.origin)}: leave one of them out")
        yield "auto.enabled", Setting(True, layer.origin)


def _walk(values: Mapping[Any, Any], section: type[Section], layer: Layer) -> Iterator[tuple[str, Setting]]:
    errors: list[ValueError | TypeError] = []
    for name, raw in values.items():
        try:
            yield from _entry(name, raw, values, section, layer)
        except (ValueError, TypeError) as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:  # all of them at once: a file with two mistakes needs no second try to tell the second
        kind = TypeError if all(isinstance(error, TypeError) for error in errors) else ValueError
        raise kind("\n".join(map(str, errors)))


def _entry(
    name: Any, raw: Any, values: Mapping[Any, Any], section: type[Section], layer: Layer
) -> Iterator[tuple[str, Setting]]:
    known = {field.name: (field, hint) for field, hint in typed_fields(section)}
    if not isinstance(name, str):
        place = f"a key of '{section.prefix[:-1]}'" if section.prefix else "a key"
        raise TypeError(wrong_type(place, name, "str", layer.origin))
    if section is ZeroConfig and name in FORMER_KEYS:
        name = _present_key(name, values, layer)
    if name not in known:
        if is_removed(section.prefix + name, raw, layer.origin):
            return
        raise ValueError(unknown_key(ZeroConfig, section, name, layer.origin))
    field, hint = known[name]
    key = section.prefix + name
    value = plain(raw, key, layer.origin)
    if section.scalar == name and isinstance(value, bool):
        value = section.booleans.get(value, value)
    if key == "stage" and value == AUTO:
        yield key, Setting(default_of(field), DEFAULT)  # also where an earlier layer has set one
        return
    if is_section(hint):
        yield from _subsection(key, value, hint, layer)
    else:
        value = check_value(key, value, hint, field.metadata.get(ACCEPTS), layer.origin)
        unset = layer.spells_defaults and value == default_of(field)
        yield key, Setting(value, DEFAULT if unset else layer.origin)


def _present_key(former: str, values: Mapping[Any, Any], layer: Layer) -> str:
    present = FORMER_KEYS[former]
    if present in values:
        raise ValueError(
            f"{former} is the former name of {present}, and both are set{from_origin(layer.origin)}: leave {former} out"
        )
    return present


def _subsection(key: str, value: Any, section: type[Section], layer: Layer) -> Iterator[tuple[str, Setting]]:
    if isinstance(value, section):
        value.check()
        # An instance is complete: it replaces what other layers said about this section.
        yield from value.settings()
    elif isinstance(value, Mapping):
        yield from _walk(value, section, layer)
    elif section.scalar and isinstance(value, _scalar_types(section)):
        yield from _walk({section.scalar: value}, section, layer)
        if section is OffloadConfig and isinstance(value, (str, bool)):
            yield from _offloaded_as(value, layer)
    else:
        # `precision: bf16-mixed` is a value of the framework's key of the same name.
        owned = owned_key(ZeroConfig, key, layer.origin) if isinstance(value, (str, int)) else None
        if owned is not None:
            raise ValueError(owned)
        names = ", ".join(field.name for field, _ in typed_fields(section))
        raise TypeError(wrong_type(key, value, f"a mapping with keys among {names}", layer.origin))


def _scalar_types(section: type[Section]) -> tuple[type, ...]:
    """Types of a value that stands for a whole section."""
    # A number alone: YAML's words and truth values are of sections with modes.
    hint = {field.name: hint for field, hint in typed_fields(section)}[section.scalar]
    return (hint,) if hint in (int, bool) else (str, bool)


def _offloaded_as(value: str | bool, layer: Layer) -> Iterator[tuple[str, Setting]]:
    """The other settings of ``offload: cpu`` and its like."""
    tier = value if isinstance(value, str) else "none"
    yield "offload.parameters", Setting(tier, f"{_OFFLOADED_AS}{value}{from_origin(layer.origin)}")
    if tier == "nvme" and (paths := nvme_paths()):
        yield "offload.nvme_path", Setting(paths, f"environment variable {NVME_PATH}")


def _build_config(settings: Mapping[str, Setting]) -> ZeroConfig:
    key, unset = "offload.parameters", Setting(None, DEFAULT)
    parameters, stage = settings.get(key, unset), settings.get("stage", Setting(3, DEFAULT))
    if parameters.origin.startswith(_OFFLOADED_AS) and stage.value != 3:  # where they are whole on the device
        settings = {name: setting for name, setting in settings.items() if name != key}
    return _build(ZeroConfig, settings)


def _build(section: type[S], settings: Mapping[str, Setting]) -> S:
    """Builds a section and those below it, and records the origin of each setting."""
    values: dict[str, Any] = {}
    for field, hint in typed_fields(section):
        key = section.prefix + field.name
        if is_section(hint):
            values[field.name] = _build(hint, settings)
        elif key in settings:
            values[field.name] = settings[key].value
    built = section(**values)
    for name in values:
        setting = settings.get(section.prefix + name)
        if setting is not None:
            built.record(name, getattr(built, name), setting.origin)
    return built


def register_hydra(group: str = "zero") -> None:
    """Put `zero0` to `zero3`, `zero_auto`, `zero2_offload`, `zero3_offload` and `zero3_nvme` into Hydra's ConfigStore.

    Each holds all settings with their defaults, at that stage. `zero3_nvme` takes its directory from the environment
    variable ZERO_STRATEGY_NVME_PATH, or from `zero.offload.nvme_path=[DIR]`.

    Call it before `hydra.main` runs. A value of a wrong type is Hydra's error, which names the key.

    Args:
        group: Name of the group.

    Raises:
        ImportError: If hydra-core is not installed.
    """
    from hydra.core.config_store import ConfigStore

    files = ["${oc.env:" + NVME_PATH + "}"]
    nodes = {f"zero{stage}": ZeroConfig(stage=stage) for stage in range(4)}
    nodes["zero2_offload"] = ZeroConfig(stage=2, offload=OffloadConfig(optimizer="cpu"))
    nodes["zero3_offload"] = ZeroConfig(stage=3, offload=OffloadConfig(optimizer="cpu", parameters="cpu"))
    nvme = OffloadConfig(optimizer="nvme", parameters="nvme", nvme_path=files)
    nodes["zero3_nvme"] = ZeroConfig(stage=3, offload=nvme)
    nodes["zero_auto"] = ZeroConfig(auto=AutoConfig(enabled=True))
    for name, node in nodes.items():
        ConfigStore.instance().store(group=group, name=name, node=node)
