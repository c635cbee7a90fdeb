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

from tests.launched import as_processes_of_torchrun


def as_processes_of_accelerate(
    words: list[str], folder: Path, env: Mapping[str, str], timeout: float = 150.0
) -> list[subprocess.CompletedProcess[str]]:
    """Results of the processes that `accelerate launch WORDS` would start on this one node, by rank.

    Args:
        words: Options of the launcher, the script and its arguments.
        folder: The directory it runs in.
        env: The launcher's whole environment.
        timeout: Seconds until a process is killed.
    """
    with patch.dict(os.environ, dict(env), clear=True):
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
        assert args.multi_gpu and not args.cpu, "by torchrun, which is what is imitated here"
        made = prepare_multi_gpu_env(args)
    script = [args.training_script, *args.training_script_args]
    made["MASTER_PORT"] = str(args.master_port)
    return as_processes_of_torchrun(script, int(args.nproc_per_node), folder, made, timeout)
