"""Processes as `accelerate launch` starts them, without the seconds that each needs for its imports.

Accelerate's own code reads the command and the file, and makes the environment. The launcher itself is run by the tests
that are about it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from tests.warm import run_warm_ranks


def run_warm_launch(
    *words: str, cwd: Path, env: Mapping[str, str], timeout: float = 150.0
) -> list[subprocess.CompletedProcess[str]]:
    """`accelerate launch WORDS` on this one node, by rank; see `run_warm_ranks`.

    Args:
        words: Options of the launcher, the script and its arguments.
        cwd: The directory it runs in.
        env: The launcher's whole environment.
        timeout: Seconds until a process is killed.
    """
    with patch.dict(os.environ, dict(env), clear=True):
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(list(words)))
        assert args.multi_gpu and not args.cpu, "by torchrun, which is what is imitated here"
        made = prepare_multi_gpu_env(args)
    made["MASTER_PORT"] = str(args.master_port)
    script = [args.training_script, *args.training_script_args]
    return run_warm_ranks(*script, count=int(args.nproc_per_node), cwd=cwd, env=made, timeout=timeout)
