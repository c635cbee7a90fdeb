"""Process groups, the device mesh and collectives: the only room that calls `torch.distributed`."""

from zero_strategy.distributed.collectives import Communicator
from zero_strategy.distributed.counters import CommunicationCounters
from zero_strategy.distributed.mesh import Mesh
from zero_strategy.distributed.pending import PendingWork
from zero_strategy.distributed.rendezvous import RendezvousError, StoreRendezvous
from zero_strategy.distributed.world import world_size

__all__ = [
    "CommunicationCounters",
    "Communicator",
    "Mesh",
    "PendingWork",
    "RendezvousError",
    "StoreRendezvous",
    "world_size",
]
