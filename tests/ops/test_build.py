"""Building and loading: races, kills, a read-only cache, no compiler; in processes and caches of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.warm import run_warm
from zero_strategy.cli import main
from zero_strategy.ops import build as cache
from zero_strategy.ops.build import BuildError, recipe, shared_libstdcxx

ROOT = Path(__file__).resolve().parents[2]
USE = """
import torch
from zero_strategy import ops
status = ops.ensure("cpu")
x = [torch.ones(5)]
assert ops.scale_(x, x, 2.0) == 0 and x[0].tolist() == [2.0] * 5
print("native" if status.path else "reference", status.path, "|", status.reason)
"""
IMPORT = """
import sys
import zero_strategy
from zero_strategy import ops
assert not any(name.startswith(("torch.utils.cpp_extension", "lightning")) for name in sys.modules), "imported too much"
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "ZERO_STRATEGY_CACHE": str(folder), "PYTHONPATH": str(ROOT), "CCACHE_DISABLE": "1", **more}


def run(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    done = run_warm(USE, cwd=ROOT, env=environment(folder, **more))
    assert done.returncode == 0, done.stderr
    return done


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.so"))


@pytest.fixture(scope="module")
def compiler() -> str:
    found = recipe("cpu").compiler
    if found is None:
        pytest.skip("no C++ compiler here")
    return found


QUICK = """#!/bin/sh
for word; do
    case "$word" in *.cpp) source=$word ;; *.o) object=$word ;; esac
done
test -n "$source" || exec "$COMPILER" "$@"
kept=$KEPT/$(basename "$source").o
test -f "$kept" && exec cp "$kept" "$object"
"$COMPILER" "$@" -O1 && cp "$object" "$kept.$$" && mv "$kept.$$" "$kept"
"""


@pytest.fixture(scope="module")
def quick(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The compiler in a hurry (GCC 12 fails at -O0): for builds that only matter for who does them, and when.

    A source is compiled only once; all builds have the same flags.
    """
    folder = tmp_path_factory.mktemp("quick")
    wrapper = folder / "c++"
    wrapper.write_text(QUICK.replace("$COMPILER", compiler).replace("$KEPT", str(folder)))
    wrapper.chmod(0o755)
    return str(wrapper)


def test_a_race_a_kill_and_a_second_process(tmp_path: Path, quick: str) -> None:
    cache_here = environment(tmp_path, CXX=quick)
    start = [sys.executable, "-c", USE]
    killed = subprocess.Popen(start, env=cache_here, start_new_session=True, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not list(tmp_path.glob("building-*/*")) and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert list(tmp_path.glob("building-*")) and not libraries(tmp_path)

    both = [
        subprocess.Popen(start, env=cache_here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    built = 0
    for process in both:
        out, errors = process.communicate(timeout=240)
        assert out.startswith("native") and process.returncode == 0, errors
        built += "built the native cpu ops" in errors
    assert built == 1  # the other one waited
    assert len(libraries(tmp_path)) == 1

    again = run(tmp_path, CXX=quick)
    assert again.stdout.startswith("native") and again.stderr == ""


def test_without_a_compiler_the_reference_runs(tmp_path: Path) -> None:
    done = run(tmp_path, PATH=str(tmp_path), CXX="")
    assert done.stdout.startswith("reference")
    assert done.stderr.count("\n") == 1
    assert "no C++ compiler" in done.stderr and "plain torch runs instead" in done.stderr


def test_a_built_library_needs_no_compiler(tmp_path: Path, compiler: str) -> None:
    made = recipe("cpu")
    built = cache.find(made.source_key, made.compiler_key)
    if built is None:
        pytest.skip("another test builds it")
    kept = tmp_path / made.source_key / built.name
    kept.parent.mkdir()
    shutil.copy(built, kept)
    assert run(tmp_path, PATH=str(tmp_path), CXX="").stdout.startswith("native")


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    fake = tmp_path / "c++"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo fake 1; exit 0; }\necho "error: out of ideas" >&2; exit 1\n'
    )
    fake.chmod(0o755)
    done = run(tmp_path / "cache", CXX=str(fake))
    assert done.stdout.startswith("reference") and "| error: out of ideas" in done.stdout
    assert "(error: out of ideas)" in done.stderr
    assert not libraries(tmp_path / "cache")


def test_a_damaged_library_does_not_stop_training(tmp_path: Path, compiler: str) -> None:
    made = recipe("cpu")
    assert made.compiler_key is not None
    broken = tmp_path / made.source_key / f"{made.compiler_key}.so"
    broken.parent.mkdir()
    broken.write_bytes(b"not a library")
    done = run(tmp_path)
    assert done.stdout.startswith("reference") and "no native cpu ops" in done.stderr


PLANTED = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void ran(void) { FILE *f = fopen(getenv("MARKER"), "w"); if (f) fclose(f); }
"""
NOBODY = 65534


@pytest.fixture(scope="module")
def planted(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that says that it was loaded."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "a.cpp").write_text(PLANTED)
    subprocess.run([compiler, "-shared", "-fPIC", str(folder / "a.cpp"), "-o", str(folder / "a.so")], check=True)
    return folder / "a.so"


@pytest.mark.parametrize("name", ["cpu", "io"])
@pytest.mark.parametrize(
    ("what", "mode", "uid", "reason"),
    [
        ("library", 0o755, None, ""),
        ("library", 0o666, None, "others may write it (owner "),
        ("library", 0o755, NOBODY, f"uid {NOBODY}, mode 0755)"),
        ("folder", 0o775, None, "mode 0775)"),
        ("folder", 0o755, NOBODY, f"another user owns it (owner nobody, uid {NOBODY}"),
        ("cache", 0o777, None, "mode 0777)"),
        ("cache", 0o1777, None, ""),
        ("cache", 0o1777, NOBODY, "another user owns it"),
        ("link", 0o755, None, "it is a link"),
    ],
)
def test_only_this_users_libraries_are_loaded(
    tmp_path: Path, planted: Path, name: str, what: str, mode: int, uid: int | None, reason: str
) -> None:
    if uid is not None and os.geteuid() != 0:
        pytest.skip("only the superuser gives files away")
    made = recipe(name)
    place = tmp_path / "cache" / made.source_key / f"{made.compiler_key}.so"
    place.parent.mkdir(parents=True)
    for folder in (place.parent, place.parent.parent):
        folder.chmod(0o755)
    if what == "link":
        place.symlink_to(planted)
    else:
        shutil.copy(planted, place)
        changed = {"library": place, "folder": place.parent, "cache": place.parent.parent}[what]
        if uid is not None:
            os.chown(changed, uid, -1)
        changed.chmod(mode)
    if name == "cpu":
        use = "from zero_strategy import ops; ops.ensure('cpu')"
    else:
        use = "from zero_strategy.offload.file_queues import open_queue; open_queue().close()"
    done = run_warm(use, cwd=ROOT, env=environment(tmp_path / "cache", MARKER=str(tmp_path / "loaded")))
    assert (tmp_path / "loaded").exists() == (not reason), done.stderr
    if reason:
        assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
        assert str(tmp_path / "cache") in done.stderr and reason in done.stderr
        assert "remove it" in done.stderr and "set ZERO_STRATEGY_CACHE" in done.stderr


def test_a_build_passes_its_own_check_under_any_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "parent" / "cache"))
    before = os.umask(0)
    try:
        with cache.turn("key"), cache.building() as folder:
            built = folder / "a.so"
            built.touch()
            built.chmod(0o777)
            kept = cache.keep(built, "key", "compiler")
    finally:
        os.umask(before)
    assert kept and cache.find("key", "compiler") == cache.find("key", None) == kept
    kept.parent.chmod(0o775)
    for use in (lambda: cache.turn("key").__enter__(), lambda: cache.keep(kept, "key", "other")):
        with pytest.raises(cache.UntrustedCacheError, match="mode 0775"):
            use()


def test_build_and_doctor_name_a_cache_that_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compiler: str
) -> None:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    tmp_path.chmod(0o777)
    assert main(["build"]) == 1
    assert f"io: not built: {tmp_path} of the cache" in capsys.readouterr().err
    doctor = "from zero_strategy.cli import main; main(['doctor', '--no-train'])"  # loads libraries, or does not
    done = run_warm(doctor, cwd=ROOT, env=environment(tmp_path))
    assert "others may write it" in " ".join(done.stdout.split()), done.stderr


def test_a_cache_that_cannot_be_written(tmp_path: Path, quick: str) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where a directory should be")  # also stops root, whom no permission stops
    done = run(blocked, CXX=quick, TMPDIR=str(tmp_path))
    assert done.stdout.startswith("native") and "cannot be written" in done.stderr


def test_switched_off_and_imported_lightly(tmp_path: Path) -> None:
    done = run(tmp_path, ZERO_STRATEGY_NATIVE="0")
    assert done.stdout.startswith("reference") and done.stderr == "" and not list(tmp_path.iterdir())
    assert "ZERO_STRATEGY_NATIVE=0" in done.stdout
    assert "not built" in run(tmp_path, ZERO_STRATEGY_NATIVE="cached").stdout
    subprocess.run([sys.executable, "-c", IMPORT], env=environment(tmp_path), check=True)
    assert not list(tmp_path.iterdir())


def test_the_key_covers_sources_flags_and_compiler(tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("int a;")
    key = cache.source_key([source], ["-O3"], "1")
    assert key == cache.source_key([source], ["-O3"], "1")
    assert key != cache.source_key([source], ["-O2"], "1") and key != cache.source_key([source], ["-O3"], "2")
    source.write_text("int b;")
    assert key != cache.source_key([source], ["-O3"], "1")
    assert cache.compiler_key("g++ 12") != cache.compiler_key("g++ 13")


def test_old_remains_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    old, new = tmp_path / "building-1-old", tmp_path / "building-2-new"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (0, 0))
    with cache.building() as folder:
        assert folder.parent == tmp_path and folder.is_dir()
    assert not old.exists() and new.exists() and not folder.exists()


def test_an_unknown_library_is_named() -> None:
    with pytest.raises(ValueError, match="no native library 'tpu'; there are cpu, cuda"):
        recipe("tpu")
    assert BuildError("why", "log").log == "log"


def test_a_compiler_with_a_static_library_alone_links_the_process_s(tmp_path: Path) -> None:
    """It would put a second C++ library into the process, which breaks in the first error text."""
    static = tmp_path / "g++"
    static.write_text(
        "#!/bin/sh\n"
        'case "$1" in -print-file-name=*) echo "${1#*=}"; exit;; esac\n'
        f'exec {shutil.which("g++")} "$@" -static-libstdc++\n'
    )
    static.chmod(0o755)
    source = tmp_path / "text.cpp"
    source.write_text(
        "#include <sstream>\nint text(int n) { std::ostringstream s; s << n; return (int)s.str().size(); }"
    )
    needed = {}
    for name, options in (("own", []), ("shared", shared_libstdcxx(str(static)))):
        made = tmp_path / f"{name}.so"
        subprocess.run([static, "-O1", "-fPIC", "-shared", source, "-o", made, *options], check=True)
        needed[name] = b"libstdc++.so.6" in made.read_bytes()
    assert needed == {"own": False, "shared": True}
    assert shared_libstdcxx("g++") == [] and shared_libstdcxx(str(tmp_path / "none")) == []
