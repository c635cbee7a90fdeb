"""The numbers of ranks with which a training can go on after deaths: its copies of the model are whole, or none is.

slots 12                                1 2 3 4 6 12       ranks that divide the slots
slots 12, two pipeline stages           2 4 6 8 12 24      copies that divide them, of two ranks each
no slots, two pipeline stages           as before          other copies would get other samples
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_strategy.config import ZeroConfig
    from zero_strategy.engine import ZeroEngine


@dataclass(frozen=True, order=True)
class Layout:
    """Numbers of ranks that fit a training, as far as a process knows it.

    Attributes:
        slots: Micro-batches of a step, which copies of the model divide; 0: they need not.
        parts: Ranks that have one copy of the model together; 0: this process has not begun it.
        multiple: The number of ranks is a multiple of it.
        ranks: The only number that fits; 0: others fit, too.
        why: Settings that make it so, in words.
    """

    slots: int = 0
    parts: int = 0
    multiple: int = 1
    ranks: int = 0
    why: str = ""

    def fitting(self, ranks: int) -> int:
        """The most of these ranks that can go on; 0: there are too few."""
        if self.ranks:
            return self.ranks if ranks >= self.ranks else 0
        sizes = range(ranks - ranks % self.multiple, 0, -self.multiple)
        copies = {size: size // max(self.parts, 1) for size in sizes}
        return next((size for size in sizes if not self.slots or self.slots % copies[size] == 0), 0)

    @property
    def least(self) -> int:
        """The fewest ranks that can go on."""
        return self.ranks or self.multiple


UNKNOWN = Layout()
"""Of a process that has not begun the training: any number of ranks fits, as far as it knows."""


def layout_of(engine: ZeroEngine, ranks: int) -> Layout:
    """The layout of a training.

    Args:
        engine: The training.
        ranks: There are.
    """
    config, parts = engine.config.config, ranks // engine.mesh.world_size
    slots, multiple = config.reproducible.slots, parts * config.mesh.replicate
    divided = parts > 1 or config.mesh.expert > 1 or config.mesh.sequence > 1
    given = config.mesh.shard is not None and not config.origin_of("mesh.shard").startswith("derived")
    # Without slots a step of other copies has other samples, and experts or sequences would be divided otherwise.
    fixed = given or (divided and not slots)
    return Layout(slots, parts, multiple, ranks if fixed else 0, _why(config, given=given))


def _why(config: ZeroConfig, *, given: bool) -> str:
    """Settings on which the number of ranks depends."""
    values = {
        "pipeline.stages": config.pipeline.stages, "mesh.tensor": config.mesh.tensor or 1,
        "mesh.replicate": config.mesh.replicate, "mesh.expert": config.mesh.expert,
        "mesh.sequence": config.mesh.sequence,
    }  # fmt: skip
    words = [f"{name} {value}" for name, value in values.items() if value > 1]
    words += [f"mesh.shard {config.mesh.shard}"] if given else []
    words += [f"reproducible.slots {config.reproducible.slots}"] if config.reproducible.slots else []
    return ", ".join(words)
