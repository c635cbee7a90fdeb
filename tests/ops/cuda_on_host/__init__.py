"""The CUDA library's sources compiled by a C++ compiler, with threads of a block as coroutines: no device needed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths, library_paths

from zero_strategy.ops import build as cache
from zero_strategy.ops.build import SOURCES, TARGET_ABI, recipe

HERE = Path(__file__).resolve().parent
OPS = (
    "adam_", "lion_", "adagrad_", "sgd_", "lamb_direction_", "lamb_apply_", "grad_stats", "scale_", "axpby_",
    "accumulate_", "flatten_", "unflatten_", "norm_forward", "norm_backward", "bias_gelu", "bias_gelu_backward",
    "bias_dropout_residual", "bias_dropout_residual_backward", "masked_softmax_dropout",
    "masked_softmax_dropout_backward", "quantize_blocks", "dequantize_blocks", "dequantize_reduce", "adam8_", "lion8_",
    "sgd8_",
)  # fmt: skip
"""What the CUDA library has kernels for: every op but those of `BY_TORCH`."""
BY_TORCH = ("exact_sums",)
"""Ops that torch's own kernels carry out on a GPU, in their references."""


def cuda_headers() -> Path | None:
    """Of the toolkit whose nvcc would compile the library."""
    compiler = recipe("cuda", ("90",)).compiler
    if compiler is None:
        return None
    # nvcc may be a script in a directory of its own; what it says of a dry run has the toolkit's place
    said = subprocess.run([compiler, "-dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    tops = [line.split("TOP=", 1)[1].strip() for line in said.splitlines() if "TOP=" in line]
    places = [Path(top) / "include" for top in tops] + [Path(compiler).resolve().parent.parent / "include"]
    return next((place for place in places if (place / "cuda_runtime.h").is_file()), None)


def build_on_host(folder: Path, headers: Path) -> Path:
    """The library, registering its kernels for tensors on the CPU; kept in the cache of all native libraries.

    The kernels' text is as it is: launches, barriers and thread numbers are replaced by `launch.cuh`. In the binding
    the words for the device are changed.
    """
    made = recipe("cpu")
    assert made.compiler is not None and made.compiler_key is not None
    files = [*recipe("cuda", ("90",)).files, *HERE.iterdir()]
    key = cache.source_key([file for file in files if file.is_file()], [str(headers), *include_paths()], TARGET_ABI)
    with cache.turn(key):
        known = cache.find(key, made.compiler_key)
        if known is not None:
            return known
        built = _compile(folder, made.compiler, headers)
        return cache.keep(built, key, made.compiler_key) or built


def _compile(folder: Path, compiler: str, headers: Path) -> Path:
    sources = folder / "cpp" / "cuda"
    shutil.copytree(SOURCES / "cuda", sources)
    for header in SOURCES.glob("*.h"):
        shutil.copy(header, folder / "cpp")
    for name in ("launch.cuh", "device.cpp"):
        shutil.copy(HERE / name, sources)
    _change(sources / "tensors.cuh", "is_cuda()", "is_cpu()")
    for binding in sources.glob("*binding.cpp"):
        _change(binding, "(zero_strategy, CUDA, ", "(zero_strategy, CPU, ")
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-w", "-DUSE_CUDA"]
    flags += ["-U_FORTIFY_SOURCE"]  # which takes a jump between stacks for an error
    flags += [f"-DTORCH_TARGET_VERSION={TARGET_ABI}", "-include", str(sources / "launch.cuh"), f"-I{headers}"]
    flags += [f"-I{path}" for path in include_paths()]
    files = [*sources.glob("*.cu"), *sources.glob("*.cpp")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda file: _run([compiler, *flags, "-x", "c++", "-c", str(file), "-o", f"{file}.o"]), files))
    library = folder / "on_host.so"
    torch_libraries = [f"-L{path}" for path in library_paths()] + ["-ltorch_cpu"]
    _run([compiler, "-shared", *(f"{file}.o" for file in files), *torch_libraries, "-o", str(library)])
    return library


def _change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, (file, old)
    file.write_text(text.replace(old, new))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
