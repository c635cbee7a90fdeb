"""Our settings as a group of Hydra's, so that they are composed and overridden with their types.

    defaults:
      - zero: zero3        # after zero_strategy.config.register_hydra()

    python train.py zero=zero2 zero.prefetch=2
    strategy = ZeroStrategy(config.zero)
"""

from __future__ import annotations

from .schema import ZeroConfig


def register_hydra(group: str = "zero") -> None:
    """Put `zero0` to `zero3` into Hydra's ConfigStore: all settings with their defaults, at that stage.

    Call it before `hydra.main` runs. A value of a wrong type is Hydra's error, which names the key.

    Args:
        group: Name of the group.

    Raises:
        ImportError: If hydra-core is not installed.
    """
    from hydra.core.config_store import ConfigStore

    for stage in range(4):
        ConfigStore.instance().store(group=group, name=f"zero{stage}", node=ZeroConfig(stage=stage))
