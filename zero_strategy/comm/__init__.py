"""Process groups, the device mesh and collectives: the only room that calls `torch.distributed`."""

from zero_strategy.comm.collectives import CommunicationCounters, Communicator, PendingWork
from zero_strategy.comm.mesh import Mesh
from zero_strategy.comm.process_group import world_size
from zero_strategy.comm.store import BarrierError, StoreBarrier

__all__ = [
    "CommunicationCounters",
    "Communicator",
    "Mesh",
    "PendingWork",
    "BarrierError",
    "StoreBarrier",
    "world_size",
]

RendezvousError = BarrierError
"""Its former name."""
