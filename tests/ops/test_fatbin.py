"""Architectures and versions read out of CUDA libraries, and what they say about a machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from zero_strategy.ops import build as cache
from zero_strategy.ops.build import COMMON_ARCHITECTURES, BuildError, carried_recipe, obtain, recipe
from zero_strategy.ops.fatbin import CudaCode, code_of, driver_version

CARRIED = CudaCode((75, 80, 90, 100, 120), (100,), 13000)
KERNEL = "__global__ void {name}(float* x) {{ x[threadIdx.x] *= 2; }}\n"


@pytest.mark.parametrize("compress", ["-no-compress", "-Xfatbin=-compress-all"])
def test_architectures_of_a_library_of_two_objects(tmp_path: Path, compress: str) -> None:
    nvcc = recipe("cuda", ("80",)).compiler
    if nvcc is None:
        pytest.skip("no nvcc here")
    (tmp_path / "one.cu").write_text(KERNEL.format(name="one"))
    (tmp_path / "two.cu").write_text(KERNEL.format(name="two"))
    flags = [compress, "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]"]
    library = tmp_path / "both.so"
    command = [nvcc, "-shared", "-Xcompiler=-fPIC", *flags, "one.cu", "two.cu", "-o", str(library)]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert code_of(library).architectures == ("sm_80", "sm_90", "compute_90")


def test_a_file_of_another_kind_is_told(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("no library")
    with pytest.raises(ValueError, match="64-bit ELF file"):
        code_of(path)
    cpu = Path(subprocess.__file__)
    with pytest.raises(ValueError, match="64-bit ELF file"):
        code_of(cpu)


def test_flags_of_a_carried_library_are_the_same_everywhere_and_name_every_architecture() -> None:
    flags = " ".join(carried_recipe("cuda").flags)
    found = re.findall(r",code=(\w+)", flags)
    assert found == ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_100"]
    assert len(found) == len(COMMON_ARCHITECTURES)
    key = carried_recipe("cuda").source_key
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_nvcc", lambda: None)
        patch.setattr(cache, "torch_cuda", lambda: "12.8")
        assert carried_recipe("cuda").compiler is None
        assert carried_recipe("cuda").source_key == key, "a machine without nvcc finds it"


@pytest.mark.parametrize(
    ("capabilities", "driver", "problem"),
    [
        ([(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)], 13000, ""),
        ([(11, 0), (13, 0)], 13000, ""),  # compiled by the driver
        ([(8, 0)], 13050, ""),
        ([(8, 0)], 14000, ""),
        ([(8, 0)], 12080, "needs a driver of CUDA 13.0, this one is of 12.8"),
        ([(8, 0)], 0, "needs a driver of CUDA 13.0"),
        ([(8, 0), (7, 0)], 13000, "no code for compute capability 7.0, but sm_75, .*compute_100"),
    ],
)
def test_devices_and_drivers(capabilities: list[tuple[int, int]], driver: int, problem: str) -> None:
    found = CARRIED.reason_against(capabilities, driver)
    assert re.search(problem, found) if problem else found == ""


def test_ptx_needs_a_driver_as_new_as_the_compiler() -> None:
    code = CudaCode((80,), (80,), 13020)
    assert code.reason_against([(8, 0)], 13000) == ""
    assert "compute capability 9.0 needs a driver of CUDA 13.2" in code.reason_against([(9, 0)], 13000)
    assert code.reason_against([(9, 0)], 13020) == ""


def test_the_driver_is_asked(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text("int cuDriverGetVersion(int* version) { *version = 12080; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    assert driver_version(str(library)) == 12080
    assert driver_version(str(tmp_path / "none.so")) == 0


def test_an_unfit_carried_library_is_built_anew_or_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried, own = tmp_path / "cuda.so", tmp_path / "own.so"
    carried.write_bytes(b"")
    monkeypatch.setattr(cache, "carried_path", lambda made: carried)
    monkeypatch.setattr(cache, "_reason_against", lambda path: "too old a driver" if path == carried else "")
    monkeypatch.setattr(cache, "find", lambda source, compiler: own)
    assert obtain("cuda", "1") == own
    monkeypatch.setattr(cache, "find", lambda source, compiler: None)
    with pytest.raises(BuildError, match="wheel's library: too old a driver; not built"):
        obtain("cuda", "cached")
    monkeypatch.setattr(cache, "_nvcc", lambda: None)
    with pytest.raises(BuildError, match="wheel's library: too old a driver; no nvcc"):
        obtain("cuda", "1")
    monkeypatch.setattr(cache, "_reason_against", lambda path: "")
    assert obtain("cuda", "1") == carried
