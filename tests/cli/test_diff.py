"""`zero-strategy checkpoint diff`: planted differences are located and named, and what they have in common is said."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fsspec")

from tests.checkpoint.object_store import ObjectStore, register
from tests.checkpoint.piece_saving import on_hosts, remote
from tests.checkpoint.piece_saving import save as save_pieces
from tests.checkpoint.saving import random_tensor, save
from zero_strategy.checkpoint import random_state
from zero_strategy.cli import main

Weights = dict[str, torch.Tensor]
GENERATOR = torch.Generator().manual_seed(5)
WEIGHTS: Weights = {
    "embed": torch.randn(8, 16, generator=GENERATOR),
    "bias": torch.randn(5, generator=GENERATOR),
    "scale": torch.tensor(2.0),
    "none": torch.zeros(0, 3),
    "seen": torch.zeros(3),
}
TRAINED = ["embed", "bias", "scale"]
STATES = {"0": {kind: {name: WEIGHTS[name] * n for name in TRAINED} for n, kind in ((2, "average"), (3, "exp_avg"))}}


def put(
    folder: Path,
    weights: Weights | None = None,
    states: Any = None,
    *,
    world_size: int = 2,
    step: int = 4,
    group: Mapping[str, Any] | None = None,
    user: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    scaler: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """A checkpoint of virtual ranks, each of which writes its slice of all elements."""
    numbers = {name: {"step": float(step)} for name in TRAINED}
    manifest = {
        "world_size": world_size,
        "stage": 2,
        "counters": {"global_steps": step, "skipped_steps": 0},
        "param_groups": {"0": [{"lr": 0.1, "betas": (0.9, 0.99), "params": TRAINED, **(group or {})}]},
        "scalars": {"0": numbers},
        "user": {"zero_strategy": {"loss_scaler": scaler, "scalar_dtypes": []}, **(user or {})},
    }
    chosen = (WEIGHTS if weights is None else weights, STATES if states is None else states)
    save(folder, *chosen, world_size=world_size, manifest=manifest, extra_files=extra_files, **options)
    return folder


def changed(name: str, change: Callable[[torch.Tensor], object], source: Weights = WEIGHTS) -> Weights:
    """All tensors, one of them changed in place."""
    found = {key: tensor.clone() for key, tensor in source.items()}
    change(found[name])
    return found


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return put(tmp_path / "a")


Diff = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def diff(capsys: pytest.CaptureFixture[str]) -> Diff:
    """Runs the command twice; gives its exit status, what it prints as JSON, and its text."""

    def run(*arguments: object) -> tuple[int, dict[str, Any], str]:
        words = ["checkpoint", "diff", *map(str, arguments)]
        status = main([*words, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert main(words) == status
        printed = capsys.readouterr()
        return status, found, printed.out + printed.err

    return run


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_number_of_ranks_is_no_difference(a: Path, tmp_path: Path, diff: Diff, world_size: int) -> None:
    status, found, text = diff(a, put(tmp_path / "b", world_size=world_size))
    assert status == 0 and found["differences"] == [] and found["equal"] == found["tensors"] == 11
    assert text.startswith("The two are equal, in 11 tensors and all records")
    assert ("saved by 2 rank(s) at stage 2, B by" in text) == (world_size != 2) == bool(found["layout"])


def test_one_element(a: Path, tmp_path: Path, diff: Diff) -> None:
    status, found, text = diff(a, put(tmp_path / "b", changed("embed", lambda t: t[6].__setitem__(3, 0.5))))
    (entry,) = found["differences"]
    first = entry["places"]["first"]
    value = WEIGHTS["embed"][6, 3].item()
    assert status == 1 and (entry["where"], entry["name"], entry["elements"], entry["numel"]) == (
        "model",
        "embed",
        1,
        128,
    )
    assert (first["index"], first["position"], first["a"], first["b"]) == (99, [6, 3], repr(value), "0.5")
    assert first["bits_b"] == "0x3f000000" and entry["max_abs"] == abs(value - 0.5)
    # The first of two ranks wrote 68 of 137 elements.
    assert (first["part_b"]["rank"], first["part_b"]["start"], first["part_b"]["stop"]) == (1, 68, 128)
    assert text.startswith(f"One element alone differs: element 99 of embed at [6, 3]: {value!r} (0x")
    assert "written by rank 1, elements 68 to 127, in A and B" in text


def test_a_slice_of_one_rank(a: Path, tmp_path: Path, diff: Diff) -> None:
    b = put(tmp_path / "b", changed("embed", lambda t: t.view(-1)[68:].add_(1)))
    _, found, _ = diff(a, b)
    (hit,) = found["differences"][0]["places"]["hits_b"]
    assert (hit["part"]["rank"], hit["elements"]) == (1, 60)
    assert "all 60 elements from 68 to 127, which rank 1 wrote, in B" in found["conclusion"]
    assert "a shard that was not updated" in found["conclusion"]
    # Saved by three, the same elements are no one's slice.
    _, found, _ = diff(a, put(tmp_path / "c", changed("embed", lambda t: t.view(-1)[68:].add_(1)), world_size=3))
    assert len(found["differences"][0]["places"]["hits_b"]) == 2
    assert "which rank 1 wrote, in A" in found["conclusion"]


def test_slices_of_one_rank_in_several_tensors(tmp_path: Path, diff: Diff) -> None:
    weights = {"x": torch.ones(8), "y": torch.ones(6), "z": torch.ones(10)}
    other = {name: tensor.clone() for name, tensor in weights.items()}
    other["x"][4:] = 2  # of 24 elements the ranks wrote 4 each: x is of ranks 0 and 1
    other["y"][:0] = 2
    for folder, given in (("a", weights), ("b", other)):
        save_pieces(on_hosts([tmp_path / folder] * 6), given, world_size=6)
    _, found, text = diff(tmp_path / "a", tmp_path / "b")
    assert "all 4 elements from 4 to 7, which rank 1 wrote, in B" in found["conclusion"]
    other = {"x": weights["x"], "y": weights["y"].clone(), "z": weights["z"].clone()}
    other["y"][4:] = 2
    other["z"][:2] = 2  # both are of rank 3
    save_pieces(on_hosts([tmp_path / "c"] * 6), other, world_size=6)
    _, found, text = diff(tmp_path / "a", tmp_path / "c")
    assert found["conclusion"].startswith("All that differs, in 2 tensors, was written by rank 3 in B")
    assert "A: " in text and "in pieces" in text


def test_ranks_of_a_number_with_divisors_are_told_with_a_condition(tmp_path: Path, diff: Diff) -> None:
    weights = {"x": torch.ones(8)}
    save(tmp_path / "a", weights, world_size=4, manifest={"world_size": 4})
    save(tmp_path / "b", changed("x", lambda t: t[4:6].add_(1), weights), world_size=4, manifest={"world_size": 4})
    _, found, _ = diff(tmp_path / "a", tmp_path / "b")
    assert "which rank 2 (if ranks divide tensors in their order) wrote" in found["conclusion"]


def test_a_row_and_a_column(a: Path, tmp_path: Path, diff: Diff) -> None:
    _, found, text = diff(a, put(tmp_path / "b", changed("embed", lambda t: t[2].add_(1))))
    assert found["conclusion"] == "All 16 elements that differ are in row 2 of embed."
    assert "elements 32 to 47 without a gap" in text
    _, found, text = diff(a, put(tmp_path / "c", changed("embed", lambda t: t[:, 7].add_(1))))
    assert found["conclusion"] == "All 8 elements that differ are in column 7 of embed."
    assert "scattered from element 7 to 119" in text


def test_names_shapes_and_dtypes(a: Path, tmp_path: Path, diff: Diff) -> None:
    half = {**WEIGHTS, "bias": torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).half()}
    whole = put(tmp_path / "whole", {**half, "bias": half["bias"].float()})
    _, found, text = diff(whole, put(tmp_path / "half", half))
    assert found["conclusion"] == "All values are equal; only dtypes of 1 tensor differ."
    assert "bias has the dtype float32 in A and float16 in B; its values are equal" in text
    without = {name: tensor for name, tensor in WEIGHTS.items() if name != "seen"}
    _, found, text = diff(a, put(tmp_path / "without", without))
    assert found["conclusion"] == "Only A has seen; all that both have is equal."
    assert "weights and buffers: seen is only in A: float32 [3]" in text
    _, found, text = diff(a, put(tmp_path / "shape", {**WEIGHTS, "seen": torch.zeros(4)}))
    assert "seen has the shape [3] in A and [4] in B" in text
    _, found, _ = diff(a, put(tmp_path / "model", {"other": torch.ones(2)}, {}))
    assert found["conclusion"].startswith("The two have no name of a weight in common")
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in WEIGHTS.items()}
    _, found, _ = diff(a, put(tmp_path / "compiled", {**compiled, "both": torch.ones(1)}))
    assert "in common" in found["conclusion"]
    _, found, _ = diff(a, put(tmp_path / "part", {**compiled, "seen": WEIGHTS["seen"]}))
    assert found["differences"] and "of different models" not in found["conclusion"]
    one = {name: WEIGHTS[name] for name in ("embed", "seen")}
    save(tmp_path / "plain", one)
    save(tmp_path / "wrapped", {"_orig_mod.embed": one["embed"], "seen": one["seen"]})
    _, found, _ = diff(tmp_path / "plain", tmp_path / "wrapped", "--weights-only")
    assert found["conclusion"].startswith("Names of 1 weight(s) differ by torch.compile's")


def test_nan_and_signs_of_zero(a: Path, tmp_path: Path, diff: Diff) -> None:
    _, found, text = diff(a, put(tmp_path / "b", changed("embed", lambda t: t[2, 3:5].fill_(math.nan))))
    assert found["conclusion"] == "Only B has NaN, in embed; the first is element 35 of embed."
    assert "NaN: 0 in A alone, 2 in B alone; first: element 35 at [2, 3]" in text
    _, found, text = diff(a, put(tmp_path / "c", changed("seen", torch.Tensor.neg_)))
    assert found["conclusion"] == (
        "Only weights that no optimizer trains (buffers, frozen ones) differ, in 1 of 11 tensors, in signs of zeros "
        "alone."
    )
    assert "0.0 (0x00000000) in A, -0.0 (0x80000000) in B, zeros of two signs" in text
    assert diff(a, tmp_path / "c", "--tolerance", 1)[0] == 0


def test_states_averages_and_rounding(a: Path, tmp_path: Path, diff: Diff) -> None:
    def with_states(folder: str, kind: str, change: Callable[[torch.Tensor], object]) -> Path:
        states = {"0": {**STATES["0"], kind: changed("bias", change, STATES["0"][kind])}}
        return put(tmp_path / folder, None, states)

    _, found, _ = diff(a, with_states("ema", "average", lambda t: t[1:].add_(1)))
    assert found["conclusion"].startswith("Only running averages differ, in 1 of 11 tensors; weights and the rest")
    near = with_states("near", "exp_avg", lambda t: t.copy_(torch.nextafter(t, t + 1)))
    _, found, _ = diff(a, near)
    assert found["conclusion"].startswith(
        "Only optimizer state (exp_avg) differs, in 1 of 11 tensors, by 1 ulp at most (as another order of sums gives"
    )
    assert found["conclusion"].endswith("all 5 weights are equal.")
    status, found, text = diff(a, near, "--tolerance", 1)
    assert status == 0 and found["equal_by_tolerance"] == 1
    assert text.startswith("The two are equal, in 11 tensors (1 of them within the tolerance)")
    assert diff(a, near, "--weights-only")[0] == 0
    states = {"0": {"average": STATES["0"]["average"]}}
    _, found, _ = diff(a, put(tmp_path / "fewer", None, states))
    assert found["conclusion"] == (
        "Only A has optimizer state (exp_avg) of embed, bias, scale; all that both have is equal."
    )


def test_everything_differs(a: Path, tmp_path: Path, diff: Diff) -> None:
    weights = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    states = {"0": {kind: {name: t + 1 for name, t in tensors.items()} for kind, tensors in STATES["0"].items()}}
    _, found, _ = diff(a, put(tmp_path / "b", weights, states, group={"lr": 0.2}))
    assert found["conclusion"] == (
        "Everything differs (10 of 11 tensors): other data, another seed or settings; also different: lr of "
        "optimizer 0 group 0."
    )


def test_settings(a: Path, tmp_path: Path, diff: Diff) -> None:
    group = {"lr": 0.2, "betas": (0.9, 0.98), "fused": True}
    _, found, text = diff(a, put(tmp_path / "b", group=group))
    assert found["conclusion"] == (
        "No tensor differs; different: lr of optimizer 0 group 0, betas[1] of optimizer 0 group 0, fused of "
        "optimizer 0 group 0."
    )
    assert "optimizer 0 group 0: lr is 0.1 in A and 0.2 in B" in text and "fused is only in B: True" in text
    scale = {"scale": 65536.0, "good_steps": 3, "skipped": 0}
    one, other = (put(tmp_path / f"s{n}", scaler={**scale, "scale": scale["scale"] / n}) for n in (1, 2))
    assert "loss scale: scale is 65536.0 in A and 32768.0 in B" in diff(one, other)[2]
    _, found, text = diff(a, put(tmp_path / "later", step=5))
    assert (
        found["conclusion"] == "A is of step 4 and B of step 5, and no tensor differs: nothing was trained in between."
    )
    assert "optimizer 0 numbers: embed.step is 4.0 in A and 5.0 in B (and 2 more alike)" in text
    _, found, text = diff(a, put(tmp_path / "trained", changed("bias", lambda t: t.add_(1)), step=5))
    assert found["conclusion"].startswith("A is of step 4 and B of step 5, so they are expected to differ")
    configs = [{"config": {"stage": stage, "offload": "cpu"}, "run": f"/runs/{stage}"} for stage in (2, 3)]
    _, found, text = diff(*(put(tmp_path / f"c{n}", user=config) for n, config in enumerate(configs)))
    assert [(e["where"], e["name"]) for e in found["differences"]] == [("user", "config.stage")]
    assert "1 path(s) of files among what frameworks saved differ" in text
    tokens = [put(tmp_path / f"t{n}", user={"accelerate": {"save": f"{n}", "step": 1}}) for n in (1, 2)]
    assert diff(*tokens)[0] == 0  # what tells one save from any other


def seeded(seed: int, draws: int = 0) -> bytes:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.rand(draws)
        return random_state.capture()


def test_random_states(tmp_path: Path, diff: Diff) -> None:
    def of(folder: str, seeds: list[int], draws: int = 0, **options: Any) -> Path:
        files = {f"random/rank-0000{rank}.json": seeded(seed, draws) for rank, seed in enumerate(seeds)}
        return put(tmp_path / folder, extra_files=files, world_size=len(seeds), **options)

    a = of("a", [1, 2])
    _, found, text = diff(a, of("b", [1, 3]))
    (entry,) = found["differences"]
    assert (entry["where"], entry["name"]) == ("random state of rank 1", "torch")
    assert entry["a"].startswith("seed 2, state ") and entry["b"].startswith("seed 3, state ")
    _, found, text = diff(a, of("c", [1, 2], draws=5))
    assert [entry["b"].split(",")[0] for entry in found["differences"]] == ["seed 1", "seed 2"]
    assert "(and 1 more alike)" in text
    status, found, text = diff(a, of("d", [1, 2, 4]))
    assert status == 0 and "are not compared" in text


def torch_file(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_small_files_are_compared_by_their_values(tmp_path: Path, diff: Diff) -> None:
    state = {"batch": 3, "order": list(range(20)), "best": "/runs/a/best", "kept": {"/runs/a/1": 0.5}}
    other = {**state, "best": "/runs/b/best", "kept": {"/runs/b/1": 0.5}}
    a, b = (put(tmp_path / n, extra_files={"client.pt": torch_file(s)}) for n, s in (("a", state), ("b", other)))
    assert diff(a, b)[0] == 0
    other |= {"batch": 4, "order": list(range(20))[::-1]}
    _, found, text = diff(a, put(tmp_path / "c", extra_files={"client.pt": torch_file(other), "new.txt": b"x"}))
    assert "client.pt: batch is 3 in A and 4 in B" in text and "files: new.txt is only in B" in text
    assert "client.pt: order[0] is 0 in A and 19 in B (the first of 20 of 20 entries)" in text
    averages = [torch_file({"mean": torch.tensor([1.0, n])}) for n in (2.0, 3.0)]
    one, two = (put(tmp_path / f"e{n}", extra_files={"average_buffers.pt": averages[n]}) for n in (0, 1))
    _, found, text = diff(one, two)
    assert found["differences"][0]["places"]["first"]["index"] == 1
    assert "average_buffers.pt: mean: 1 of 2 elements differ" in text
    one, two = (put(tmp_path / f"f{n}", extra_files={"notes": bytes([n])}) for n in (0, 1))
    assert "notes is 1 bytes, checksum" in diff(one, two)[2]


def test_ties_under_other_names(tmp_path: Path, diff: Diff) -> None:
    tied, rest = {"embed": WEIGHTS["embed"]}, {"bias": WEIGHTS["bias"]}
    save(tmp_path / "a", {**tied, **rest}, aliases={"head": "embed"})
    save(tmp_path / "b", {"head": WEIGHTS["embed"], **rest}, aliases={"embed": "head"})
    assert diff(tmp_path / "a", tmp_path / "b")[0] == 0
    save(tmp_path / "c", {**tied, **rest, "head": WEIGHTS["embed"] + 1})
    _, found, _ = diff(tmp_path / "a", tmp_path / "c")
    assert [(e["where"], e["name"]) for e in found["differences"]] == [("model", "head"), ("ties", "head")]


def test_ten_of_a_kind_unless_all_are_asked_for(tmp_path: Path, diff: Diff) -> None:
    many = {f"layer{n:02}": torch.full((3,), float(n)) for n in range(14)}
    save(tmp_path / "a", many)
    save(tmp_path / "b", {name: tensor * 2 if name != "layer13" else tensor for name, tensor in many.items()})
    _, found, text = diff(tmp_path / "a", tmp_path / "b")
    assert text.count("elements differ") == 10 and "and 2 more: --all tells of them" in text
    assert len(found["differences"]) == 12 and text.index("layer01") < text.index("layer02")
    assert diff(tmp_path / "a", tmp_path / "b", "--all")[2].count("elements differ") == 12


def test_the_damaged_one_of_two_checkpoints_is_named(a: Path, tmp_path: Path, diff: Diff) -> None:
    shutil.copytree(a, tmp_path / "b")
    for name in ("model.safetensors", "optimizer/exp_avg.safetensors"):
        file = tmp_path / "b" / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        status, found, text = diff(a, tmp_path / "b")
        assert status == 2 and f"b/{name}: tensor " in found["error"] and "is damaged" in text
        file.write_bytes(content)
    (tmp_path / "b/manifest.json").write_bytes(b"{}")
    assert diff(a, tmp_path / "b")[0] == 2
    status, _, text = diff(a, a, "--tolerance", -1)
    assert status == 2 and "a tolerance of -1 ulps: give 0" in text


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("OBJECT_STORE_ROOT", str(tmp_path / "store"))
    yield register(tmp_path / "store")
    ObjectStore.faults.clear()


def test_pieces_and_urls(bucket: str, tmp_path: Path, diff: Diff) -> None:
    weights = {name: WEIGHTS[name] for name in ("embed", "bias")}
    save_pieces(remote(f"{bucket}/c", 2), weights)
    save_pieces(remote(f"{bucket}/d", 2), changed("embed", lambda t: t.view(-1)[66:].add_(1), weights))
    save_pieces(on_hosts([tmp_path / "local"] * 2), weights)
    status, found, _ = diff(f"{bucket}/c", tmp_path / "local")
    assert status == 0 and found["layout"] == []
    status, found, _ = diff(f"{bucket}/c", f"{bucket}/d")
    assert status == 1 and "all 62 elements from 66 to 127, which rank 1 wrote, in B" in found["conclusion"]
    save(tmp_path / "whole", weights, manifest={"world_size": 2})
    status, found, _ = diff(tmp_path / "local", tmp_path / "whole", "--weights-only")
    assert status == 0 and found["layout"] == ["A is in pieces, a file for each rank; the other is in shared files"]
    assert diff(bucket, f"{bucket}/nothing")[0] == 2


def test_blocks_larger_than_a_checksum_s(tmp_path: Path, diff: Diff) -> None:
    numel = (16 << 20) // 2 + 1000  # of 16-bit numbers: a block and a bit
    x = random_tensor(torch.bfloat16, (numel,)).nan_to_num(0.0)
    y = x.clone()
    y[-10:] = 3.0
    save(tmp_path / "a", {"w": x}, world_size=1)
    save(tmp_path / "b", {"w": y}, world_size=1)
    _, found, text = diff(tmp_path / "a", tmp_path / "b")
    (entry,) = found["differences"]
    assert (entry["places"]["start"], entry["places"]["stop"]) == (numel - 10, numel)
    assert entry["places"]["first"]["part_a"]["stop"] == numel  # the end of a block is none of a slice
    assert "written by rank 0, in A and B" in text


def test_what_could_not_be_compared(a: Path, tmp_path: Path, diff: Diff) -> None:
    (tmp_path / "empty").mkdir()
    for other in (tmp_path / "empty", tmp_path / "none", ""):
        status, found, text = diff(a, other)
        assert status == 2 and found.keys() == {"error"} and found["error"] in text
    shutil.copytree(a, tmp_path / "b")
    (tmp_path / "b/optimizer/exp_avg.safetensors").unlink()
    assert "exp_avg.safetensors is missing" in diff(a, tmp_path / "b")[2]


def test_odd_tensors_numbers_and_names(tmp_path: Path, diff: Diff) -> None:
    odd = {
        "none": torch.zeros(3, 0, 2),
        "number": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "wave": torch.tensor([1 + 2j, 3j]),
        "small": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "a\x1b[31m\nb": torch.ones(2),
    }
    other = {name: tensor.clone() for name, tensor in odd.items()}
    other["number"] += 1
    other["flags"][1] = True
    other["wave"][1] = -3j
    other["small"].view(torch.uint8)[0] += 3
    other["a\x1b[31m\nb"][1] = 2
    huge = {"counters": {"global_steps": 10**300}, "user": {"n": 10**300, "x": math.nan}}
    save(tmp_path / "a", odd, world_size=1, manifest=huge)
    save(tmp_path / "b", other, world_size=1, manifest={**huge, "user": {"n": 10**300 + 1, "x": math.nan}})
    _, found, text = diff(tmp_path / "a", tmp_path / "b")
    assert found["tensors"] == 6 and len(found["differences"]) == 6
    assert "user: n is a whole number of 997 bits in A" in text and "step a whole number of 997 bits" in text
    assert "3 (0x0000000000000003) in A, 4 (0x0000000000000004) in B" in text
    assert "False (0x00) in A, True (0x01) in B" in text
    assert "1.0 (0x38) in A, 1.375 (0x3b) in B, 3 ulps apart" in text
    assert "(0x00000000,0x40400000) in A" in text and "(0x80000000,0xc0400000) in B" in text
    assert "a\\x1b[31m\\nb: 1 of 2 elements differ" in text
    save(tmp_path / "nothing", {}, world_size=1)
    assert diff(tmp_path / "nothing", tmp_path / "nothing")[0] == 0
    assert "no name of a weight in common" in diff(tmp_path / "nothing", tmp_path / "a", "--weights-only")[2]
