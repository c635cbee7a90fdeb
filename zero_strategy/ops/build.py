"""Building the native libraries, and the cache in which they lie.

One file per source text, flags, ABI and compiler, put there whole or not at all.

    <cache>/<key of sources, flags, ABI, machine>/<key of compiler>.so
    <cache>/<key of sources, flags, ABI, machine>/lock
    <cache>/building-<pid>-<random>/       a build under way; renamed file by file, swept when its process is gone

Processes that want the same library at once wait for the one that builds it: a lock of the kernel's (flock), which ends
with its process, so that none is left behind. Where a file system has no such locks, both build and the last one's file
stays. A killed build leaves a directory that nobody looks into. A cache that cannot be written is replaced by a
temporary directory of this process.

A library is code, so nothing is loaded from, or built in, a cache that another user owns or may write.

Those of the CPU and of CUDA are built by `torch.utils.cpp_extension`.

`cpp_extension` refuses CUDA sources beside a torch without CUDA, and an nvcc of another major version than torch's
CUDA. There nvcc is called directly: the kernels include nothing of torch but its stable ABI. The library of file I/O
includes nothing of torch at all, and is one call of the compiler.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import platform
import pwd
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from zero_strategy.ops.fatbin import code_of, driver_version

CACHE_VARIABLE = "ZERO_STRATEGY_CACHE"
_STALE_SECONDS = 24 * 3600
_FOLDER_MODE = 0o755
"""Less the umask: others may read what is built, such as the users of an image, and never write."""


class UntrustedCacheError(PermissionError):
    """Another user owns, or may write, a library or a directory of the cache."""


def cache_directory() -> Path:
    """`$ZERO_STRATEGY_CACHE`, else `$XDG_CACHE_HOME/zero_strategy`, else `~/.cache/zero_strategy`."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zero_strategy"


def source_key(sources: Iterable[Path], flags: Iterable[str], abi: str) -> str:
    """A key of everything but the compiler that decides what a library does."""
    digest = hashlib.sha256()
    for part in (*flags, abi, platform.machine(), platform.system()):
        digest.update(part.encode() + b"\0")
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def compiler_key(identity: str) -> str:
    """A key of a compiler's name, version and further arguments."""
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def find(source: str, compiler: str | None) -> Path | None:
    """The library that was built from these sources by this compiler, or by any one where there is none here.

    Raises:
        UntrustedCacheError: If another user owns or may write it, or a directory of the cache above it.
    """
    folder = cache_directory() / source
    check_owner(folder)
    paths = sorted(folder.glob("*.so") if compiler is None else folder.glob(f"{compiler}.so"))
    if not paths:
        return None
    check_owner(paths[0])
    return paths[0]


def check_owner(path: Path) -> None:
    """Check that a path of the cache, and the directories of the cache above it, are this process's user's alone.

    The superuser's are taken, too: who has its rights needs no library to run code here. So is a cache's own directory
    that all may write but where nobody may replace another's entries, as in /tmp. What does not exist is nobody's.

    Raises:
        UntrustedCacheError: With path, owner, mode and the way out.
    """
    cache = cache_directory()
    inside = [path, *path.parents]
    for place in reversed(inside[: inside.index(cache) + 1]):
        try:
            found = place.stat() if place == cache else place.lstat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return  # so that nothing can be loaded from there, either
        sticky = place == cache and found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()):
            why = "another user owns it"
        elif stat.S_ISLNK(found.st_mode):
            why = "it is a link, whose target may be anybody's"
        elif found.st_mode & 0o022 and not sticky:
            why = "others may write it"
        else:
            continue
        raise UntrustedCacheError(
            f"{place} of the cache of native libraries is not this user's (uid {os.geteuid()}) alone: {why} "
            f"(owner {_name_of(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o}); remove it and what it holds, "
            f"or set {CACHE_VARIABLE} to a directory that only you may write"
        )


def _name_of(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name}, uid {uid}"
    except KeyError:  # as in a container that knows no such user
        return f"uid {uid}"


def _make_folder(path: Path) -> None:
    """Make the cache's directory, or one in it, for this user to write.

    Raises:
        UntrustedCacheError: If it is there and not this user's alone.
        OSError: If it cannot be made.
    """
    cache = cache_directory()
    cache.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    path.mkdir(mode=_FOLDER_MODE, exist_ok=True)
    check_owner(path)


@contextmanager
def turn(source: str) -> Iterator[None]:
    """Inside, no other process of this machine builds the same sources, if the file system has locks.

    Raises:
        UntrustedCacheError: If the place is not this user's alone.
    """
    try:
        folder = cache_directory() / source
        _make_folder(folder)
        lock = (folder / "lock").open("w")
    except UntrustedCacheError:
        raise
    except OSError:
        yield
        return
    with lock:
        with suppress(OSError):  # as on some network file systems: two builds at once cost time only
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def building() -> Iterator[Path]:
    """A fresh directory beside the cache's entries, or elsewhere if the cache cannot be written; removed at the end.

    Raises:
        UntrustedCacheError: If the cache is not this user's alone.
    """
    cache = cache_directory()
    try:
        _make_folder(cache)
        path = Path(tempfile.mkdtemp(prefix=f"building-{os.getpid()}-", dir=cache))
        _sweep(cache)
    except UntrustedCacheError:
        raise
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="zero_strategy-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def keep(built: Path, source: str, compiler: str) -> Path | None:
    """Move a built library into the cache.

    Returns:
        Its place there, which may hold an equal one of another process; None if the cache cannot be written.

    Raises:
        UntrustedCacheError: If the place is not this user's alone.
    """
    target = cache_directory() / source / f"{compiler}.so"
    try:
        _make_folder(target.parent)
        built.chmod(built.stat().st_mode & ~0o022)  # as the linker left it, group-writable under some umasks
        os.replace(built, target)  # in one step; readers that have the old file open keep it
    except UntrustedCacheError:
        raise
    except OSError:
        return None
    return target


def _sweep(cache: Path) -> None:
    """Remove what killed builds left."""
    for path in cache.glob("building-*"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another process removed it
            continue


TARGET_ABI = "0x020b000000000000"
"""The oldest torch whose stable ABI the libraries ask for: 2.11."""
_PACKAGE = Path(__file__).resolve().parent.parent
SOURCES = next(place for place in (_PACKAGE / "cpp", _PACKAGE.parent / "cpp") if place.is_dir())
"""C++ and CUDA sources: inside of an installed package, beside the package in a checkout."""
CPU_FLAGS: tuple[str, ...] = (
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    f"-DTORCH_TARGET_VERSION={TARGET_ABI}",
)
CUDA_FLAGS = (
    "-O3",
    "-std=c++17",
    "--fmad=false",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off",
    f"-DTORCH_TARGET_VERSION={TARGET_ABI}",
    "-DUSE_CUDA",
)
_CUDA_HOST_FLAGS = ("-O3", "-fvisibility=hidden", "-ffp-contract=off", *CUDA_FLAGS[-2:])
"""Flags of the CUDA library's .cpp files, which have no device code and are compiled once for all architectures."""
_UNDEFINED = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
"""Parts of CUDA's headers that `cpp_extension` leaves out, and the kernels use."""
IO_FLAGS: tuple[str, ...] = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
COMMON_ARCHITECTURES = ("75", "80", "90", "100", "120", "compute_100")
"""Architectures for which a wheel's library is built, and one where there is no device to ask.

Machine code for 80 runs on 86 and 89, too, and likewise in the other majors; the driver makes code for all that came
after 10.0 and has none of its own (11.0, what is still to come) of PTX, which "compute_100" stands for.
"""
LIBRARIES = ("cpu", "cuda", "io")
"""All of them; a binary wheel carries each that can be built where it is made."""
_CARRIED_CUDA_FLAGS = ("-Xfatbin=-compress-all", "-Werror=all-warnings")
"""Beside those of a build for its own machine, where a warning of a newer compiler is no reason to go without."""
_TITLES = {"cpu": "cpu ops", "cuda": "cuda ops", "io": "file I/O"}


class BuildError(RuntimeError):
    """A library could not be built.

    Attributes:
        reason: The first line that says why.
        log: All that the compiler said.
    """

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.reason, self.log = reason, log


@dataclass(frozen=True)
class Recipe:
    """Recipe of one library.

    Attributes:
        name: "cpu", "cuda" or "io".
        sources: Translation units.
        files: These and all headers, whose text is part of the key.
        flags: Compiler flags.
        compiler: Path of the compiler.
        identity: Name and version of the compiler, and what else depends on this machine.
        portable: Asks nothing of another machine's toolkit: for wheels.
    """

    name: str
    sources: tuple[Path, ...]
    files: tuple[Path, ...]
    flags: tuple[str, ...]
    compiler: str | None
    identity: str
    portable: bool = False

    @property
    def source_key(self) -> str:
        """Key of the sources and flags."""
        host = _CUDA_HOST_FLAGS if self.name == "cuda" else ()
        return source_key(self.files, (*self.flags, *host), TARGET_ABI)

    @property
    def compiler_key(self) -> str | None:
        """Key of the compiler, None without one."""
        return None if self.compiler is None else compiler_key(self.identity)


def recipe(name: str, architectures: Sequence[str] = ()) -> Recipe:
    """The recipe of library "cpu", "cuda" or "io".

    Args:
        name: The library.
        architectures: CUDA architectures such as "90", or "compute_90" for PTX; default: those of this machine's
            devices, else a common set.

    Raises:
        ValueError: If there is no such library.
    """
    if name not in LIBRARIES:
        raise ValueError(f"there is no native library {name!r}; there are {', '.join(LIBRARIES)}")
    folder = SOURCES / name
    shared = [] if name == "io" else SOURCES.glob("*.h")
    headers = [*shared, *(path for kind in ("h", "cuh", "inl") for path in folder.glob(f"*.{kind}"))]
    sources = sorted([*folder.glob("*.cu"), *folder.glob("*.cpp")])
    if name != "cuda":
        compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
        flags = IO_FLAGS if name == "io" else CPU_FLAGS
        return Recipe(name, tuple(sources), tuple([*sources, *headers]), flags, compiler, _version_of(compiler))
    nvcc = _nvcc()
    chosen = tuple(architectures) or _device_architectures()
    flags = (*CUDA_FLAGS, *map(_gencode, chosen))
    identity = _version_of(nvcc) + (f"\nlinked to CUDA {torch_cuda()}" if takes_cuda_sources(nvcc) else "")
    return Recipe(name, tuple(sources), tuple([*sources, *headers]), flags, nvcc, identity)


def carried_recipe(name: str) -> Recipe:
    """The recipe of a library that a binary wheel carries, whose key is the same on every machine."""
    if name != "cuda":
        return recipe(name)
    made = recipe(name, COMMON_ARCHITECTURES)
    return replace(made, flags=(*made.flags, *_CARRIED_CUDA_FLAGS), identity=_version_of(made.compiler), portable=True)


def _gencode(architecture: str) -> str:
    number = architecture.removeprefix("compute_")
    return f"-gencode=arch=compute_{number},code={'sm_' if number == architecture else 'compute_'}{number}"


def torch_cuda() -> str | None:
    """Version of CUDA that this torch was built with, such as "13.0"; None for a torch without it."""
    import torch

    return torch.version.cuda


def takes_cuda_sources(nvcc: str | None) -> bool:
    """True if `torch.utils.cpp_extension` compiles CUDA sources here: torch has CUDA, of nvcc's major version."""
    release, known = re.search(r"release (\d+)\.", _version_of(nvcc)), torch_cuda()
    return release is not None and known is not None and known.split(".")[0] == release[1]


def carried_path(made: Recipe, package: Path = _PACKAGE) -> Path:
    """Place of a library in a package that a binary wheel installs; one of other sources would lie elsewhere."""
    return package / "native" / made.source_key / f"{made.name}.so"


def obtain(name: str, mode: str) -> Path:
    """The library that the installed wheel carries, else the one in the cache, else a freshly built one.

    Args:
        name: "cpu", "cuda" or "io".
        mode: Value of `ZERO_STRATEGY_NATIVE`: with "cached" nothing is built.

    Raises:
        BuildError: If it has to be built, and that is not allowed or fails.
        UntrustedCacheError: If another user owns or may write the cache.
    """
    carried, against = carried_path(carried_recipe(name)), ""
    if carried.is_file():
        against = _reason_against(carried) if name == "cuda" else ""
        if not against:
            return carried
        against = f"of the wheel's library: {against}; "
    made = recipe(name)
    path = find(made.source_key, made.compiler_key)
    if path is None and mode == "cached":
        raise BuildError(f"{against}not built, and ZERO_STRATEGY_NATIVE=cached")
    try:
        path = path or build(made)
    except BuildError as error:
        raise BuildError(against + error.reason, error.log) from error
    if name == "cuda" and (against := _reason_against(path)):
        raise BuildError(against)
    return path


def _reason_against(library: Path) -> str:
    """Why a CUDA library cannot run under this machine's driver, on its devices; "": it can."""
    import torch

    capabilities = [torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())]
    try:
        return code_of(library).reason_against(capabilities, driver_version())
    except ValueError as error:
        return str(error)


def build(made: Recipe, *, anew: bool = False, announce: bool = True) -> Path:
    """Compile a library and put it into the cache.

    Args:
        made: The recipe.
        anew: Also if it is there already.
        announce: Say in one line on stderr what is built, and how long it took.

    Returns:
        The library, which another process may have built meanwhile; in a temporary directory of this process if the
        cache cannot be written.

    Raises:
        BuildError: With the compiler's first error.
        UntrustedCacheError: If another user owns or may write the cache.
    """
    if made.compiler is None or made.compiler_key is None:
        what = "no nvcc: set CUDA_HOME, or put it on PATH" if made.name == "cuda" else "no C++ compiler: set CXX"
        raise BuildError(what)
    with turn(made.source_key):
        known = None if anew else find(made.source_key, made.compiler_key)
        return known or _build(made, made.compiler_key, announce)


def _build(made: Recipe, compiler_key: str, announce: bool) -> Path:
    start = time.perf_counter()
    if announce:
        _say(f"building the native {_TITLES[made.name]} with {made.compiler}, once for this machine ...")
    with building() as folder:
        built = _COMPILE[made.name](made, folder)
        kept = keep(built, made.source_key, compiler_key)
        if kept is None:
            kept = _outlive(built)
            _say(f"the cache {cache_directory()} cannot be written: the library is for this process only")
    if announce:
        _say(f"built the native {_TITLES[made.name]} in {time.perf_counter() - start:.1f} s")
    return kept


_COMPILING = "import sys; from zero_strategy.ops.build import compile_order; compile_order(sys.argv[1])"
"""The program of that process."""


def compile_order(order: str) -> None:
    """Build one library with `torch.utils.cpp_extension`, and load it once to see that it is whole.

    Args:
        order: Arguments of its `load` as a JSON object.
    """
    # ninja comes with pip beside this interpreter, which need not be on PATH
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    from torch.utils import cpp_extension

    cpp_extension.load(**json.loads(order), is_python_module=False, verbose=False)


def _compile_cpu(made: Recipe, folder: Path) -> Path:
    """Compile in another process: its output is caught whole, and an interrupt ends it without a trace here."""
    order = {
        "name": "zero_strategy_cpu",
        "sources": [str(path) for path in made.sources],
        "extra_cflags": list(made.flags),
        "extra_ldflags": shared_libstdcxx(str(made.compiler)),
        "build_directory": str(folder),
    }
    _run([sys.executable, "-c", _COMPILING, json.dumps(order)], {"CXX": str(made.compiler)})
    return folder / "zero_strategy_cpu.so"


def _compile_cuda(made: Recipe, folder: Path) -> Path:
    if made.portable or not takes_cuda_sources(made.compiler):
        return _compile_by_nvcc(made, folder)
    home = Path(str(made.compiler)).resolve().parent.parent
    if not (home / "include" / "cuda_runtime.h").exists():  # a script elsewhere that calls it
        home = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    order = {
        "name": "zero_strategy_cuda",
        "sources": [str(path) for path in made.sources],
        "extra_cflags": list(_CUDA_HOST_FLAGS),
        "extra_cuda_cflags": [*made.flags, *(f"-U__CUDA_NO_{part}__" for part in _UNDEFINED)],
        "extra_ldflags": shared_libstdcxx(os.environ.get("CXX", "c++")),
        "build_directory": str(folder),
        "with_cuda": True,
    }
    _run([sys.executable, "-c", _COMPILING, json.dumps(order)], {"CUDA_HOME": str(home)})
    return folder / "zero_strategy_cuda.so"


def _compile_by_nvcc(made: Recipe, folder: Path) -> Path:
    from torch.utils.cpp_extension import include_paths

    includes = [f"-I{path}" for path in include_paths()]
    objects = [folder / f"{source.stem}.o" for source in made.sources]
    compile_one = [str(made.compiler), *made.flags, *includes, "-c"]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = [
            pool.submit(_run, [*compile_one, str(source), "-o", str(target)])
            for source, target in zip(made.sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    library = folder / "zero_strategy_cuda.so"
    architectures = [flag for flag in made.flags if flag.startswith("-gencode")]
    # nvcc's own runtime: it need not be the version that torch brings, and the loader need not find it
    link = [
        str(made.compiler),
        "-shared",
        "-cudart=static",
        *architectures,
        *map(str, objects),
        *_torch_libraries(made.portable),
        *shared_libstdcxx("c++"),
    ]
    _run([*link, "-o", str(library)])
    return library


def _compile_io(made: Recipe, folder: Path) -> Path:
    library = folder / "zero_strategy_io.so"
    _run([str(made.compiler), *made.flags, *map(str, made.sources), "-o", str(library)])
    return library


def shared_libstdcxx(compiler: str) -> list[str]:
    """Linker options by which the process's C++ library is used where the compiler has a static one only.

    A library with a copy of its own dies in the first error text: streams of one copy ask for the other's facets.

    Args:
        compiler: The C++ compiler that links.
    """
    name = "libstdc++.so"
    try:
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    # A compiler that does not find a file gives its name back; one that has no such option fails.
    return ["-l:libstdc++.so.6"] if not found.returncode and found.stdout.strip() == name else []


_COMPILE = {"cpu": _compile_cpu, "cuda": _compile_cuda, "io": _compile_io}


def _torch_libraries(portable: bool) -> list[str]:
    """Named as needed, because importing torch does not make its symbols visible to libraries loaded later.

    libtorch names the others that its torch has: a library built beside a torch without CUDA serves one with it, too.
    """
    import torch

    folder = Path(torch.__file__).parent / "lib"
    wanted = ("torch", "torch_cpu") if portable else ("torch", "torch_cpu", "torch_cuda")
    names = [name for name in wanted if (folder / f"lib{name}.so").exists()]
    return ["-Xlinker=--no-as-needed", f"-L{folder}", *(f"-l{name}" for name in names)]


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise _failure(done.stdout)


def _failure(log: str) -> BuildError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\s*:", line, re.IGNORECASE)]
    return BuildError((errors or lines[-1:] or ["the compiler said nothing"])[0], log)


def _outlive(built: Path) -> Path:
    """A place that stays as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="zero_strategy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(shutil.move(built, folder / built.name))


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [str(Path(home) / "bin")] if home else []
    return shutil.which("nvcc", path=os.pathsep.join([*places, os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))


def _device_architectures() -> tuple[str, ...]:
    import torch

    if torch.cuda.is_available():
        found = {torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())}
        return tuple(f"{major}{minor}" for major, minor in sorted(found))
    return COMMON_ARCHITECTURES


@lru_cache
def _version_of(compiler: str | None) -> str:
    if compiler is None:
        return ""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    return f"{Path(compiler).resolve()}\n{done.stdout}"


def _say(text: str) -> None:
    print(f"zero_strategy: {text}", file=sys.stderr, flush=True)
