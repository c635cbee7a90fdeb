"""Runs a function under the real DeepSpeed on gloo ranks: processes of their own, for it keeps global state.

results = run("module:function", world_size, argument)      # JSON in, torch.save'd result of each rank out
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]


def run(function: str, world_size: int, argument: dict[str, Any], timeout: float = 240) -> list[Any]:
    """Calls `function(argument)` on each rank, with DeepSpeed and its process group ready."""
    with tempfile.TemporaryDirectory() as scratch:
        processes = []
        for rank in range(world_size):
            env = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "",
            }  # fmt: skip
            command = [sys.executable, "-m", __name__, function, scratch, json.dumps(argument)]
            log = open(Path(scratch) / f"{rank}.log", "wb")  # noqa: SIM115 - closed with the process
            processes.append((subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log), log))
        try:
            codes = [process.wait(timeout) for process, _ in processes]
        finally:
            for process, log in processes:
                process.kill()
                process.wait()
                log.close()
        if any(codes):
            logs = [(Path(scratch) / f"{rank}.log").read_text(errors="replace")[-6000:] for rank in range(world_size)]
            raise AssertionError(f"exit codes {codes}\n" + "\n---- next rank ----\n".join(logs))
        return [torch.load(Path(scratch) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def main() -> None:
    function, scratch, argument = sys.argv[1:]
    import deepspeed

    # Its faster messages between processes would be compiled first, for minutes; gloo's serve.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, init_method=f"file://{scratch}/store", rank=rank, world_size=world_size
    )
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(json.loads(argument))
    torch.save(result, Path(scratch) / f"{rank}.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
