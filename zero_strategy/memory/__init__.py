"""Where model state lives: tiers off the device, the ledger of what is held, the same computed ahead.

    ChunkStore    vectors in a tier, cut into chunks
      ChunkSlots    passes over chunks: read ahead, change in place, write behind
      StateFile     records in reserved files of this process
        FileQueue     blocks between files and memory, by io_uring or threads
    probe         how fast a directory's drive is
"""

from __future__ import annotations

from zero_strategy.memory.backends import BACKENDS, IO_VARIABLE, open_queue
from zero_strategy.memory.drive_speed import DriveSpeed, probe
from zero_strategy.memory.file_queue import Extent, FileQueue, OpenFile, Request
from zero_strategy.memory.host_memory import HostMemory
from zero_strategy.memory.ownership import remove_stale
from zero_strategy.memory.record_checksums import CorruptRecordError
from zero_strategy.memory.state_file import StateFile, TornRecordError, Transfer

__all__ = [
    "StateFile",
    "Transfer",
    "TornRecordError",
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
