"""`python -c CODE ARGUMENTS` without the seconds that imports take: in a fork of the server that has them loaded.

For checks that need a process to themselves, as of what works where this package cannot be imported: the server loads
torch and the frameworks of others only. Not for what happens while a process starts or ends: code registered with
`atexit` does not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path

from tests.launcher import fork_server


def _main(code: str, arguments: tuple[str, ...], env: Mapping[str, str], cwd: Path, out: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c", *arguments]
    assert "zero_strategy" not in sys.modules
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


def run_warm(
    code: str, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run`, with the output captured as text.

    Args:
        code: Of the module `__main__`.
        arguments: The rest of `sys.argv`.
        cwd: The directory it runs in.
        env: Its whole environment; default: this process's.
        timeout: Seconds until it is killed.
    """
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        out = Path(folder)
        values = dict(os.environ if env is None else env)
        process = fork_server().Process(target=_main, args=(code, arguments, values, cwd, out), daemon=True)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
        texts = ((out / name).read_text() if (out / name).exists() else "" for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess([code, *arguments], process.exitcode or 0, *texts)
