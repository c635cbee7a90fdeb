"""Places of model state: tiers off the device, the ledger of what is held, the same computed ahead.

ChunkStore    vectors in a tier, cut into chunks
  ChunkSlots    passes over chunks: read ahead, change in place, write behind
  StateFile     records in reserved files of this process
    FileQueue     blocks between files and memory, by io_uring or threads
probe         how fast a directory's drive is
"""

from __future__ import annotations

from zero_strategy.offload.file_io import Extent, FileQueue, OpenFile, Request
from zero_strategy.offload.file_queues import BACKENDS, IO_VARIABLE, open_queue
from zero_strategy.offload.part_file import CorruptRecordError, remove_stale
from zero_strategy.offload.state_file import PartialRecordError, StateFile, Transfer
from zero_strategy.offload.stores import DriveSpeed, probe
from zero_strategy.offload.tier import HostMemory

__all__ = [
    "StateFile",
    "Transfer",
    "PartialRecordError",
    "CorruptRecordError",
    "remove_stale",
    "probe",
    "DriveSpeed",
    "FileQueue",
    "Request",
    "Extent",
    "OpenFile",
    "open_queue",
    "BACKENDS",
    "IO_VARIABLE",
    "HostMemory",
]

TornRecordError = PartialRecordError
"""Its former name."""
