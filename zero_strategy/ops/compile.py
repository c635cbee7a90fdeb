"""Compiles one library with `torch.utils.cpp_extension.load`; run as a process of its own by `build.py`.

python -m zero_strategy.ops.compile '{"name": ..., "sources": [...], "extra_cflags": [...], "build_directory": ...}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(order: str) -> None:
    """Build, and load once to see that the library is whole."""
    # ninja comes with pip beside this interpreter, which need not be on PATH
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    from torch.utils import cpp_extension

    cpp_extension.load(**json.loads(order), is_python_module=False, verbose=False)


if __name__ == "__main__":
    main(sys.argv[1])
