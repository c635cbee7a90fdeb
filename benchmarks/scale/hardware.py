"""Machines that steps are predicted on: figures with the names of their sources, and what is assumed beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.scale.collectives import Group, Link

_GB = 1e9
_US = 1e-6


@dataclass(frozen=True)
class Machine:
    """A cluster of equal hosts.

    Attributes:
        name: Of it.
        peak_flops: Operations per second of a rank's device, dense, in the dtype of the computation.
        compute_efficiency: The part of it that forward and backward reach by themselves.
        memory_bytes: Of the device.
        memory_bandwidth: Bytes per second of that memory.
        memory_efficiency: The part of it that an optimizer step reaches.
        ranks_per_host: How many ranks share `within`.
        within: The link between ranks of a host.
        between: The link of one rank to other hosts.
        link_efficiency: The part of both bandwidths that large messages reach.
        start: Seconds before the first message of a collective.
        add: Seconds to add up a byte in a reduction.
        overlap: The part of the smaller of computation and communication that is hidden behind the larger one.
        unit_overhead: Seconds of the host for one pass (forward or backward) of one unit, beside its computation.
        step_overhead: The same of a step.
        asynchronous: The host runs ahead of the device: its time for a unit counts where it is the longer one only.
        sources: Where each figure is from.
    """

    name: str
    peak_flops: float
    compute_efficiency: float
    memory_bytes: float
    memory_bandwidth: float
    memory_efficiency: float
    ranks_per_host: int
    within: Link
    between: Link
    link_efficiency: float = 1.0
    start: float = 0.0
    add: float = 0.0
    overlap: float = 1.0
    unit_overhead: float = 0.0
    step_overhead: float = 0.0
    asynchronous: bool = True
    sources: tuple[str, ...] = ()

    def group(self, ranks: int, stride: int = 1) -> Group:
        """Ranks r, r + stride, r + 2 stride, ..., where ranks are numbered host by host."""
        here = min(ranks, max(1, self.ranks_per_host // stride))
        slower = self.link_efficiency
        within = Link(self.within.latency, self.within.bandwidth * slower)
        between = Link(self.between.latency, self.between.bandwidth * slower)
        return Group(ranks, math.ceil(ranks / here), within, between, self.start, self.add)


_NCCL = (
    "latencies: 3.4 us a step in a host, 9.6 us between hosts, 8.4 us to start, NCCL 2.10, src/graph/tuning.cc "
    "(ring, protocol Simple)"
)


def _gpu(
    name: str, tflops: float, gigabytes: float, memory: float, nvlink: float, network: float, sources: tuple[str, ...]
) -> Machine:
    """Eight GPUs a host; gigabytes per second, of links in one direction."""
    return Machine(
        name=name,
        peak_flops=tflops * 1e12,
        compute_efficiency=0.4,
        memory_bytes=gigabytes * _GB,
        memory_bandwidth=memory * _GB,
        memory_efficiency=0.8,
        ranks_per_host=8,
        within=Link(3.4 * _US, nvlink * _GB),
        between=Link(9.6 * _US, network * _GB),
        link_efficiency=0.8,
        start=8.4 * _US,
        overlap=0.9,
        unit_overhead=500 * _US,
        step_overhead=1e-3,
        sources=(*sources, _NCCL),
    )


PRESETS: Mapping[str, Machine] = MappingProxyType(
    {
        "h100-sxm": _gpu(
            "h100-sxm", 989.4, 80, 3350, 450, 50,
            (
                "bf16 989.4 TFLOP/s dense, HBM3 80 GB at 3.35 TB/s, NVLink 4 at 900 GB/s, 450 in each direction: "
                "NVIDIA H100 Tensor Core GPU datasheet (SXM5)",
                "one 400 Gb/s NDR InfiniBand port (50 GB/s) for each of 8 GPUs: NVIDIA DGX H100 datasheet",
            ),
        ),
        "h200-sxm": _gpu(
            "h200-sxm", 989.4, 141, 4800, 450, 50,
            (
                "bf16 989.4 TFLOP/s dense, HBM3e 141 GB at 4.8 TB/s, NVLink 4 at 900 GB/s, 450 in each direction: "
                "NVIDIA H200 Tensor Core GPU datasheet (SXM)",
                "one 400 Gb/s NDR InfiniBand port (50 GB/s) for each of 8 GPUs: NVIDIA DGX H200 datasheet",
            ),
        ),
        "a100-sxm": _gpu(
            "a100-sxm", 312, 80, 2039, 300, 25,
            (
                "bf16 312 TFLOP/s dense, HBM2e 80 GB at 2.039 TB/s, NVLink 3 at 600 GB/s, 300 in each direction: "
                "NVIDIA A100 Tensor Core GPU datasheet (SXM4)",
                "one 200 Gb/s HDR InfiniBand port (25 GB/s) for each of 8 GPUs: NVIDIA DGX A100 datasheet",
            ),
        ),
    }
)  # fmt: skip
