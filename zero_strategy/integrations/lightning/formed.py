"""Lightning's view of processes that form a world by themselves, and form another one when some of them die."""

from __future__ import annotations

import os

from zero_strategy.survive.membership import PLACE, World
from zero_strategy.survive.run import RANKS


class FormedEnvironment:
    """Stands in for Lightning's cluster environments.

    Before there is a world, processes have the numbers that their launcher gave them.

    Attributes:
        world: The ranks; None: nobody has met yet.
    """

    creates_processes_externally = True

    def __init__(self) -> None:
        self.world: World | None = None

    def __getstate__(self) -> dict[str, object]:
        """State for a copy of a Trainer."""
        return {"world": None}

    @staticmethod
    def detect() -> bool:
        """False: a strategy asks for it."""
        return False

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """Port of its store."""
        return int(os.environ["MASTER_PORT"])

    def world_size(self) -> int:
        """Number of ranks."""
        return int(os.environ.get(RANKS) or 1) if self.world is None else self.world.size

    def global_rank(self) -> int:
        """This process's."""
        return int(os.environ.get(PLACE) or 0) if self.world is None else self.world.rank

    def local_rank(self) -> int:
        """Number of this rank on its host."""
        return self.global_rank() if self.world is None else self.world.local_rank

    def node_rank(self) -> int:
        """0: ranks are counted through, on all hosts."""
        return 0

    def set_world_size(self, size: int) -> None:
        """Nothing: the world is what it is."""

    def set_global_rank(self, rank: int) -> None:
        """Nothing, as above."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Nothing: devices are those of the ranks that there are."""

    def teardown(self) -> None:
        """Nothing: the variables of the environment are those of the process group."""
