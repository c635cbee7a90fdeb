"""Our settings as a group of Hydra's, so that they are composed and overridden with their types.

    defaults:
      - zero: zero3        # after zero_strategy.config.register_hydra()

    python train.py zero=zero2 zero.prefetch=2
    strategy = ZeroStrategy(config.zero)
"""

from __future__ import annotations

from .schema import OffloadConfig, ZeroConfig
from .sources import NVME_PATH


def register_hydra(group: str = "zero") -> None:
    """Put `zero0` to `zero3`, `zero2_offload`, `zero3_offload` and `zero3_nvme` into Hydra's ConfigStore.

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
    for name, node in nodes.items():
        ConfigStore.instance().store(group=group, name=name, node=node)
