"""One of Accelerate's own distributed scripts with our class in place of Accelerate's: `upstream.py NAME STAGE`."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from zero_strategy.integrations.accelerate import ZeroAccelerator

NAME, STAGE = sys.argv[1], int(sys.argv[2])


class Staged(ZeroAccelerator):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, zero_config={"stage": STAGE, "units": {"min_numel": 0}}, **keywords)


def main() -> None:
    processes = ZeroAccelerator().num_processes  # the scripts ask for the state before they make one
    script: Any = importlib.import_module(f"accelerate.test_utils.scripts.{NAME}")
    script.Accelerator = Staged
    script.main()
    if os.environ["RANK"] == "0":
        print(f"passed: {NAME} {STAGE} {processes}")


if __name__ == "__main__":
    main()
