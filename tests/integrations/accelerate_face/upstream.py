"""A script of Accelerate with our class in place of Accelerate's: `upstream.py NAME STAGE [REDUCTION]`.

`test_sync_matrix` is the part of `test_sync` that it leaves out on the CPU: accumulation with all kinds of loaders.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from zero_strategy.integrations.accelerate import ZeroAccelerator

NAME, STAGE, REDUCTION = sys.argv[1], int(sys.argv[2]), (*sys.argv, None)[3]


class Staged(ZeroAccelerator):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        config = {"stage": STAGE, "units": {"min_numel": 0}, "gradient_reduction": REDUCTION}
        super().__init__(*arguments, zero_config=config, **keywords)


def run(name: str) -> None:
    if name != "test_sync_matrix":
        script: Any = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
        script.Accelerator = Staged
        script.main()
        return
    script = importlib.import_module("accelerate.test_utils.scripts.test_sync")
    script.Accelerator = Staged
    for case in itertools.product([True, False], repeat=3):
        script.test_gradient_accumulation(*case)
        script.test_gradient_accumulation_with_opt_and_scheduler(*case)


def main() -> None:
    processes = ZeroAccelerator().num_processes  # the scripts ask for the state before they make one
    run(NAME)
    if os.environ["RANK"] == "0":
        print(f"passed: {NAME} {STAGE} {processes}")


if __name__ == "__main__":
    main()
