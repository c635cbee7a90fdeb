"""ZeRO-1/2/3 sharding for PyTorch Lightning, Fabric and plain torch.

Importing this package compiles nothing, touches no GPU and imports no framework: public names are loaded on first use.
It makes the strategy names "zero1", "zero2" and "zero3" known to Lightning, whichever of the two is imported first.
"""

from __future__ import annotations

from importlib import import_module

from zero_strategy.aliases import FORMER as _FORMER
from zero_strategy.aliases import install as _install_aliases
from zero_strategy.registration import install as _install
from zero_strategy.version import __version__

TYPE_CHECKING = False  # typing's own takes longer to import than all of this; type checkers know the name
if TYPE_CHECKING:  # what editors and type checkers see; at run time each name is imported when it is asked for
    from zero_strategy import activation as activation
    from zero_strategy import checkpoint as checkpoint
    from zero_strategy import comm as comm
    from zero_strategy import config as config
    from zero_strategy import diagnostics as diagnostics
    from zero_strategy import engine as engine
    from zero_strategy import fsdp as fsdp
    from zero_strategy import fsdp as sharding  # noqa: F401
    from zero_strategy import integrations as integrations
    from zero_strategy import offload as offload
    from zero_strategy import ops as ops
    from zero_strategy import optim as optim
    from zero_strategy import pipeline as pipeline
    from zero_strategy import registration as registration
    from zero_strategy import verify as verify
    from zero_strategy.comm.process_group import init_distributed
    from zero_strategy.compat.deepspeed import scripts as scripts
    from zero_strategy.compat.deepspeed import transformer as transformer
    from zero_strategy.compat.deepspeed.scripts.entry import add_config_arguments, initialize
    from zero_strategy.config import ZeroConfig, load_config, register_hydra
    from zero_strategy.engine import ZeroEngine
    from zero_strategy.integrations.accelerate import ZeroAccelerator
    from zero_strategy.integrations.engine_of import engine_of
    from zero_strategy.integrations.lightning import PipelineStrategy, ZeroStrategy
    from zero_strategy.integrations.lightning.checkpoint_dict import (
        LoadsFromDirectory,
        load_from_checkpoint,
        open_checkpoint,
    )
    from zero_strategy.integrations.transformers import ZeroTrainer
    from zero_strategy.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLamb, FusedLion, FusedSGD
    from zero_strategy.pipeline.engine import PipelineEngine
    from zero_strategy.publish.subscriber import subscribe

__all__ = [
    "__version__",
    "FusedAdagrad",
    "FusedAdam",
    "FusedAdamW",
    "FusedLamb",
    "FusedLion",
    "FusedSGD",
    "LoadsFromDirectory",
    "PipelineEngine",
    "PipelineStrategy",
    "ZeroAccelerator",
    "ZeroConfig",
    "ZeroEngine",
    "ZeroStrategy",
    "ZeroTrainer",
    "add_config_arguments",
    "engine_of",
    "init_distributed",
    "initialize",
    "load_config",
    "load_from_checkpoint",
    "open_checkpoint",
    "register_hydra",
    "subscribe",
]

_PACKAGES = (
    "activation",
    "checkpoint",
    "cli",
    "comm",
    "compat",
    "config",
    "convert",
    "diagnostics",
    "engine",
    "fsdp",
    "integrations",
    "offload",
    "ops",
    "optim",
    "pipeline",
    "planning",
    "publish",
    "registration",
    "verify",
    "watchdog",
)
_MODULE_OF = {
    "FusedAdagrad": "zero_strategy.optim",
    "FusedAdam": "zero_strategy.optim",
    "FusedAdamW": "zero_strategy.optim",
    "FusedLamb": "zero_strategy.optim",
    "FusedLion": "zero_strategy.optim",
    "FusedSGD": "zero_strategy.optim",
    "LoadsFromDirectory": "zero_strategy.integrations.lightning.checkpoint_dict",
    "PipelineEngine": "zero_strategy.pipeline.engine",
    "ZeroAccelerator": "zero_strategy.integrations.accelerate",
    "ZeroConfig": "zero_strategy.config",
    "ZeroEngine": "zero_strategy.engine",
    "ZeroTrainer": "zero_strategy.integrations.transformers",
    "add_config_arguments": "zero_strategy.compat.deepspeed.scripts",
    "engine_of": "zero_strategy.integrations.engine_of",
    "init_distributed": "zero_strategy.comm.process_group",
    "initialize": "zero_strategy.compat.deepspeed.scripts",
    "load_config": "zero_strategy.config",
    "load_from_checkpoint": "zero_strategy.integrations.lightning.checkpoint_dict",
    "open_checkpoint": "zero_strategy.integrations.lightning.checkpoint_dict",
    "register_hydra": "zero_strategy.config",
    "subscribe": "zero_strategy.publish.subscriber",
}

_install()
_install_aliases()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _MODULE_OF:
            try:
                return getattr(import_module(_MODULE_OF[name]), name)
            except ModuleNotFoundError as error:
                if error.name not in ("accelerate", "transformers"):
                    raise
                needed = f"zero_strategy.{name} needs {error.name}: pip install {error.name}"
                raise ModuleNotFoundError(needed, name=error.name) from error
        if name in ("ZeroStrategy", "PipelineStrategy"):  # of the Lightning that is in use
            from zero_strategy.integrations import namespaces

            namespace = namespaces.default_trainer_namespace()
            return getattr(import_module(namespaces.MODULES[namespace]), name)
        if name in _PACKAGES or name in _FORMER:
            return import_module(f"zero_strategy.{name}")
        raise AttributeError(f"module 'zero_strategy' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *_PACKAGES})
