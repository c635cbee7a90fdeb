"""The keys of a DeepSpeed JSON that a framework owns, compared with what the framework has.

A number in the JSON that nothing acts on would be another run than the one that was asked for. So each key that a
framework owns is ``"auto"``, or equal to the framework's value, or an error that names both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from zero_strategy.config.deepspeed.classify import AUTO
from zero_strategy.config.deepspeed.settings import Named
from zero_strategy.config.resolve import Fact
from zero_strategy.config.schema import ZeroConfig
from zero_strategy.config.section import Setting, from_origin
from zero_strategy.config.sources import owned_key

LATER_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "optimizer")
"""Keys that can only be compared once there are a data loader and an optimizer."""

# Facts by their names in a framework, then by DeepSpeed's own, for integrations that act on the key themselves.
_FACTS = {
    "train_batch_size": ("samples_per_step", "train_batch_size"),
    "train_micro_batch_size_per_gpu": ("micro_batch_per_rank", "train_micro_batch_size_per_gpu"),
    "gradient_accumulation_steps": ("accumulate_grad_batches", "gradient_accumulation_steps"),
    "gradient_clipping": ("gradient_clip_val", "gradient_clipping"),
    "precision": ("training_precision",),
    "torch_autocast": ("training_precision",),
    "optimizer": ("optimizer",),
    "scheduler": ("scheduler",),
    "dataloader_drop_last": ("dataloader_drop_last",),
}


def check_owned(config: ZeroConfig, facts: Mapping[str, Fact], later: Collection[str] = ()) -> None:
    """Raises where a DeepSpeed config and the framework disagree. Other configs pass.

    Args:
        config: The config, as `load_config` made it.
        facts: What the framework has, by name.
        later: Keys that are compared in a later call if there is no fact about them yet.

    Raises:
        ValueError: If a value differs from the framework's, or nobody would act on it; names the key and the
            framework's own argument. The fact about the optimizer is the optimizer itself.
    """
    if config.deepspeed is None:
        return
    for key, setting in config.deepspeed.owned.items():
        fact = next((facts[name] for name in _FACTS[key] if name in facts), None)
        if fact is None:
            if key not in later and not _idle(key, setting):
                raise ValueError(_nobody(key, setting))
        elif key == "optimizer":
            _check_optimizer(config.deepspeed.optimizer, fact)
        elif key == "torch_autocast":
            _check_autocast(setting, fact)
        elif _comparable(key, fact.value) != setting.value:
            raise ValueError(
                f"{key} is {setting.value!r}{from_origin(setting.origin)}, but {fact.value!r} in "
                f'{fact.origin}; make them equal, or write "auto" in the JSON'
            )
    algorithm = facts.get("gradient_clip_algorithm")
    clip = config.deepspeed.owned.get("gradient_clipping")
    if clip is not None and clip.value and algorithm is not None and algorithm.value == "value":
        raise ValueError(
            f"gradient_clipping is {clip.value}{from_origin(clip.origin)}, a bound on the norm, but {algorithm.origin} "
            'clips values; use one of the two, or write "auto" in the JSON'
        )


def dtype_fact(compute_dtype: object) -> dict[str, Fact]:
    """The fact of an engine in a loop of its user's: what its parameters are computed in, None for their own dtype."""
    return {"training_precision": Fact(str(compute_dtype), f"ZeroEngine(compute_dtype={compute_dtype})")}


def _idle(key: str, setting: Setting) -> bool:
    """True if a value asks nobody to do anything."""
    return (key, setting.value) in (
        ("gradient_clipping", 0.0),
        ("gradient_accumulation_steps", 1),
        ("dataloader_drop_last", False),
    )


def _check_optimizer(named: Named | None, fact: Fact) -> None:
    """Compares an optimizer of the JSON with the one that there is, by class and by what is not ``"auto"``."""
    assert named is not None, "owned means that it was accepted"
    if fact.value is named:
        return  # an integration that made it from the JSON
    kind = type(fact.value).__name__.removeprefix("Fused")
    if kind != named.type:
        raise ValueError(
            f"optimizer.type is {named.type!r}{from_origin(named.origin)}, but {fact.origin} is {kind}; make them "
            "equal, or leave the section out"
        )
    for name, value in named.params.items():
        there = getattr(fact.value, "defaults", {}).get(name)
        if value != AUTO and (list(value) != list(there or ()) if isinstance(value, (list, tuple)) else value != there):
            raise ValueError(
                f"optimizer.params.{name} is {value!r}{from_origin(named.origin)}, but {there!r} in {fact.origin}; "
                'make them equal, or write "auto" in the JSON'
            )


def _check_autocast(setting: Setting, fact: Fact) -> None:
    """Compares autocast with a framework's own: `bf16-mixed` of Lightning, `bf16` of Accelerate and transformers."""
    names = {"bf16": ("bf16-mixed", "bf16"), "fp16": ("16-mixed", "fp16")}[setting.value]
    if fact.value not in names:
        raise ValueError(
            f"torch_autocast asks for autocast to {setting.value}{from_origin(setting.origin)}, and {fact.origin} has "
            f'{fact.value!r}; make them equal (Trainer(precision="{names[0]}"), Accelerator(mixed_precision='
            f'"{names[1]}")), or leave the section out and wrap forwards in torch.autocast'
        )


def _nobody(key: str, setting: Setting) -> str:
    if key == "dataloader_drop_last":
        where = f"'{key}'{from_origin(setting.origin)}"
        return f"{where} cannot be set here: set DataLoader(drop_last=True) and leave it out"
    message = owned_key(ZeroConfig, key, setting.origin)
    assert message is not None
    way_out = "leave the section out" if key in ("optimizer", "scheduler") else 'write "auto" in the JSON'
    return f"{message}; and {way_out} (it has {setting.value!r})"


def _comparable(key: str, value: Any) -> Any:
    if key == "gradient_clipping":
        return float(value or 0.0)
    if key == "precision":
        # Lightning's bf16-mixed, 16-true, 32-true, ...; Accelerate's bf16, fp16, no; torch.bfloat16, torch.float16.
        flag = str(value).removeprefix("torch.")
        low = {"bf": "bf16", "16": "fp16", "fp16": "fp16", "float16": "fp16"}
        return next((name for start, name in low.items() if flag.startswith(start)), "fp32")
    return value
