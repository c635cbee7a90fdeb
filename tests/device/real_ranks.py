"""Forks as many real ranks as are asked for, each of which trains and prints what its control plane has sent.

python real_ranks.py RANKS FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.comm.forked import fork_ranks
from tests.device.control_plane import CountedStore, DeviceAlike, Tally, counted_messages, train
from zero_strategy.comm import collectives, store
from zero_strategy.comm.process_group import init_distributed
from zero_strategy.runtime.torch_private import default_store


def rank(number: int, ranks: int, folder: Path) -> dict[str, Any]:
    """One rank: every message of its control plane goes to the others, and is counted on its way."""
    init_distributed("gloo", init_method=f"file://{folder}/store", rank=number, world_size=ranks, verbose=False)
    tally = Tally()
    with (
        patch.object(store, "default_store", lambda: CountedStore(default_store(), tally)),
        patch.object(collectives, "HostCollectives", type("Counted", (DeviceAlike,), {"tally": tally})),
        counted_messages(tally, answered=False),
    ):
        # Nobody is slow: a watchdog that has to look would ask the store.
        train(tally, folder, stage=3, watchdog={"wait_seconds": 600.0})
    found = {
        event: {
            "store": sent.store,
            "messages": sent.messages,
            "peers": sorted(sent.peers),
            "collectives": sorted([kind, size, count] for (kind, size), count in sent.collectives.items()),
        }
        for event, sent in tally.events.items()
    }
    dist.barrier()
    return found


if __name__ == "__main__":
    fork_ranks(rank)
