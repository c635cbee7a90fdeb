"""Page-locked host memory: what CUDA keeps of a call that failed, and how many calls there are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zero_strategy.offload import tier
from zero_strategy.offload.tier import HostMemory, HostTier

RUNTIME = """
static int last = 0;
int cudaGetLastError(void) { int found = last; last = 0; return found; }
int cudaPeekAtLastError(void) { return last; }
int fail(void) { return last = 2; }
"""
SCRIPT = """
import ctypes, sys, warnings
import pytest
import torch
from tests.device.gpus import Gpus
runtime = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

class Binding:  # as torch's: it gives the code, and does not ask for it
    def cudaHostRegister(self, address, nbytes, flags):
        return runtime.fail()

gpus = Gpus(pytest.MonkeyPatch(), seen=1)
torch.cuda.cudart = lambda: Binding()
from zero_strategy.offload.tier import HostMemory, HostTier
memory = HostMemory(4096, pinned=True)
assert not memory.pinned and "error 2" in memory.reason
assert runtime.cudaPeekAtLastError() == 0
with warnings.catch_warnings(record=True):
    HostTier(pinned=True).reserve({"a": 5000})
assert runtime.cudaPeekAtLastError() == 0
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_pinning_failed_registration_leaves_no_error(tmp_path: Path) -> None:
    """The runtime has the code until it is asked for it; the next launch of a kernel would raise it."""
    source, library = tmp_path / "runtime.c", tmp_path / "libruntime.so"
    source.write_text(RUNTIME)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    command = [sys.executable, "-c", SCRIPT, str(library)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr


def test_records_are_locked_in_few_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Locked(HostMemory):
        def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
            super().__init__(nbytes)
            self.pinned = pinned
            made.append(self.nbytes)

    monkeypatch.setattr(tier, "HostMemory", Locked)
    monkeypatch.setattr(tier, "_REGION", 1 << 20)
    sizes = {str(number): 100_000 + number for number in range(100)} | {"large": 3 << 20, "empty": 0}
    host = HostTier(pinned=True)
    host.reserve(sizes)
    taken = sum(HostMemory.rounded(max(size, 1)) for size in sizes.values())
    assert sum(made) == taken and len(made) == 12
    for number, (name, size) in enumerate(sizes.items()):
        memory = host.resident(name)
        assert memory.numel() == size and (not size or memory.data_ptr() % 4096 == 0)
        memory.fill_(number % 256)
    assert all(bool((host.resident(name) == number % 256).all()) for number, name in enumerate(sizes))
    host.release(list(sizes))
    made.clear()
    HostTier().reserve(sizes)  # elsewhere memory goes back record by record
    assert len(made) == len(sizes)
    assert torch.cuda.is_available() or not HostMemory(1, pinned=True).pinned
