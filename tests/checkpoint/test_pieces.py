"""Pieces on hosts that share nothing: the same state as in place, one host's or all hosts', and no mixture."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from tests.checkpoint.piece_saving import in_place, jobs_of, on_hosts, own_file, run_jobs, save
from tests.checkpoint.saving import all_dtypes, random_tensor, same
from zero_strategy.checkpoint import CheckpointReader, Manifest, save_job
from zero_strategy.checkpoint.manifest import seal
from zero_strategy.checkpoint.piece_reader import PieceReader
from zero_strategy.checkpoint.reader import Wanted
from zero_strategy.cli import main
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.cli.checkpoint_merge import merge
from zero_strategy.comm.store import SaveBoard
from zero_strategy.convert.convert import open_any
from zero_strategy.runtime.host_bytes import checksum_of

WEIGHTS = {
    "a": random_tensor(torch.float32, (7, 5)),
    "empty": torch.zeros(0, 3),
    "b": random_tensor(torch.bfloat16, (11,)),
    "scalar": torch.tensor(3.0),
    **all_dtypes(),
}
STATES = {"0": {"exp_avg": {"a": random_tensor(torch.float32, (7, 5), 1), "b": random_tensor(torch.float32, (11,), 2)}}}
EXTRA = {"lightning.pt": b"rest"}


def hosts(root: Path, world: int, per_host: int = 1) -> list[Path]:
    return [root / f"host{rank // per_host}" / "c" for rank in range(world)]


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize("max_file_bytes", [10**9, 100])
def test_merged_pieces_are_what_an_in_place_save_writes(
    tmp_path: Path, world: int, per_host: int, max_file_bytes: int
) -> None:
    options: dict[str, Any] = {"world_size": world, "extra_files": EXTRA, "max_file_bytes": max_file_bytes}
    save(in_place(tmp_path / "in_place", world), WEIGHTS, STATES, **options)
    directories = hosts(tmp_path, world, per_host)
    save(on_hosts(directories), WEIGHTS, STATES, **options)
    merged = merge(list(dict.fromkeys(directories))[::-1], tmp_path / "merged")
    assert content(tmp_path / "merged") == content(tmp_path / "in_place")  # the manifest included
    assert (merged.ranks, merged.files) == (world, len(content(tmp_path / "merged")) - 1)
    assert main(["checkpoint", "verify", str(tmp_path / "merged"), "--quiet"]) == 0


def test_ranks_write_their_slices_and_nothing_else(tmp_path: Path) -> None:
    directories = hosts(tmp_path, 3)
    save(on_hosts(directories), WEIGHTS, STATES, world_size=3, extra_files=EXTRA)
    total = 0
    for rank, directory in enumerate(directories):
        files = sorted(content(directory))
        folder = "pieces-t"
        assert files == [
            "manifest.json",
            f"{folder}/files/lightning.pt",
            f"{folder}/files/random/rank-{rank:05d}.json",
            f"{folder}/rank-{rank:05d}.safetensors",
        ]
        assert (directory.parent / "latest").read_text() == "c\n"
        place = directory / folder / f"rank-{rank:05d}.safetensors"
        with safe_open(place, "pt") as file:
            assert all(len(file.get_slice(name).get_shape()) == 1 for name in file.keys())  # noqa: SIM118
        data = place.read_bytes()
        total += len(data) - 8 - int.from_bytes(data[:8], "little")
    everything = [*WEIGHTS.values(), *STATES["0"]["exp_avg"].values()]
    assert total == sum(tensor.numel() * tensor.element_size() for tensor in everything)
    manifests = {(directory / "manifest.json").read_bytes() for directory in directories}
    assert len(manifests) == 1


def test_ranks_agree_on_a_folder_whose_mark_one_sees_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, looked, found = dist.HashStore(), threading.local(), dict[int, save_job.Sharing]()
    is_there = save_job._is_there

    def late(parent: Path, token: str, rank: int) -> bool:
        first, looked.once = not hasattr(looked, "once"), True
        return not (first and threading.current_thread().name == "1") and is_there(parent, token, rank)

    def ask(rank: int) -> None:
        found[rank] = save_job.find_out(SaveBoard(rank, 3, 10.0, "test", store), tmp_path, "token")

    monkeypatch.setattr(save_job, "_is_there", late)
    threads = [threading.Thread(target=ask, args=(rank,), name=str(rank)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(one.shared, one.leader) for one in found.values()} == {(True, 0)} and found[0].leaders == (0, 0, 0)


@pytest.mark.parametrize("verify", [True, False])
def test_with_all_pieces_any_range_is_read(tmp_path: Path, verify: bool) -> None:
    save(on_hosts([tmp_path / "c"] * 3), WEIGHTS, STATES, world_size=3, extra_files=EXTRA)
    reader = open_any(tmp_path, verify=verify)
    assert isinstance(reader, PieceReader) and reader.lacking() == []
    assert all(same(reader.full(name), tensor) for name, tensor in WEIGHTS.items())
    shapes = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}
    assert {name: spec.shape for name, spec in reader.weights.items()} == shapes
    for name, tensor in STATES["0"]["exp_avg"].items():
        assert same(reader.full(name, ("0", "exp_avg")), tensor)
    flat = WEIGHTS["a"].reshape(-1)
    for start in range(0, 36, 5):
        for stop in range(start, 36, 3):
            assert same(reader.read("a", start, stop), flat[start:stop])
    found: list[torch.Tensor] = []
    ranges = [("a", 3, 30), ("scalar", 0, 1), ("empty", 0, 0), ("b", 4, 4), ("a", 29, 31)]
    reader.read_many([Wanted(name, start, stop, then=found.append) for name, start, stop in ranges])
    wanted = [WEIGHTS[name].reshape(-1)[start:stop] for name, start, stop in ranges]
    assert sorted(map(repr, found)) == sorted(map(repr, wanted))
    assert [reader.extra(path) for path in own_file(1)] == list(own_file(1).values())
    assert reader.extra("lightning.pt") == b"rest"


def test_one_host_has_its_own_part_and_says_whose_the_rest_is(tmp_path: Path) -> None:
    directories = hosts(tmp_path, 2)
    save(on_hosts(directories), {"w": torch.arange(10.0)}, extra_files=EXTRA)
    for rank, directory in enumerate(directories):
        reader = open_any(directory)
        assert isinstance(reader, PieceReader)
        assert reader.read("w", 5 * rank, 5 * rank + 5).tolist() == torch.arange(5.0 * rank, 5.0 * rank + 5).tolist()
        assert reader.extra("lightning.pt") == b"rest"
        assert reader.lacking() == [1 - rank]
        with pytest.raises(ValueError, match=rf"pieces-t/rank-0000{1 - rank}.*rank {1 - rank}.*'w'.*checkpoint merge"):
            reader.full("w")
        with pytest.raises(ValueError, match=rf"rank {1 - rank}.*random/rank-0000{1 - rank}.*checkpoint merge"):
            reader.extra(next(iter(own_file(1 - rank))))
    with pytest.raises(ValueError, match=r"pieces of rank\(s\) \[1\] are missing"):
        merge([directories[0]], tmp_path / "merged")
    shutil.copytree(directories[1], directories[0], dirs_exist_ok=True)  # by hand is as good
    assert same(open_any(directories[0]).full("w"), torch.arange(10.0))
    assert not (tmp_path / "merged").exists()


def test_a_reader_of_ordinary_files_says_what_to_do(tmp_path: Path) -> None:
    save(on_hosts([tmp_path / "c"] * 2), WEIGHTS)
    with pytest.raises(ValueError, match="checkpoint merge"):
        CheckpointReader(tmp_path / "c")


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    save(on_hosts([tmp_path / "c"] * 2), {"w": torch.arange(100.0), "v": torch.ones(3, dtype=torch.bfloat16)})
    assert verify(tmp_path).problems == ()
    for place in sorted((tmp_path / "c").rglob("*.*")):
        data = place.read_bytes()
        for at in range(0, len(data), max(1, len(data) // 23)):
            place.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            if place.name == "manifest.json":
                with pytest.raises(ValueError, match=r"manifest.json"):
                    verify(tmp_path)
            else:
                assert place.name in " ".join(verify(tmp_path).problems)
        for changed in (data[:-1], data + b"x"):
            place.write_bytes(changed)
            if place.name != "manifest.json":
                assert place.name in " ".join(verify(tmp_path).problems)
        place.write_bytes(data)
    (tmp_path / "c" / "stray").write_bytes(b"")
    assert "stray: the manifest does not list it" in verify(tmp_path).problems[0]
    one = hosts(tmp_path, 2)
    save(on_hosts(one), {"w": torch.arange(100.0)})
    assert all("rank 1 wrote it on its host" in problem for problem in verify(one[0]).problems)
    assert len(verify(one[0]).problems) == 2
    assert "rank-00001.safetensors: is missing; rank 1 wrote it on its host; lost: 'w'" in verify(one[0]).problems[0]


def saved(place: Path) -> dict[str, Any]:
    """The manifest of a checkpoint of two tensors with two moments and step counters, in pieces of two ranks."""
    values = {"w": torch.arange(12.0).view(3, 4), "v": torch.ones(4)}
    scalars = {name: {"step": 3.0} for name in values}
    plan_states = {"0": {"exp_avg": values, "exp_avg_sq": values}}
    jobs = jobs_of(on_hosts([place] * 2), values, plan_states)
    adam = {"0": replace(jobs[0].manifest.optimizers["0"], scalars=scalars)}
    assert run_jobs([replace(job, manifest=replace(job.manifest, optimizers=adam)) for job in jobs]) == {}
    found: dict[str, Any] = json.loads((place / "manifest.json").read_text())
    return found


def resealed(place: Path, content: dict[str, Any]) -> None:
    (place / "manifest.json").write_bytes(seal(json.dumps(content).encode()))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda m: m["weights"]["w"].update(shape=[4, 3]), r"weights.w .*\(4, 3\).*model.safetensors.*\(3, 4\)"),
        (lambda m: m["weights"]["w"].update(dtype="I32"), r"weights.w is torch.int32 .*model.safetensors.*float32"),
        (lambda m: m["weights"]["w"].update(file="optimizer/exp_avg.safetensors"), r"not list: \['v'\]"),
        (lambda m: m["weights"].pop("w"), r"model.safetensors that weights does not list: \['w'\]"),
        (lambda m: m["weights"].update(u=m["weights"]["w"]), r"'u' in model.safetensors, and pieces has no such"),
        (lambda m: m["optimizers"]["0"]["scalars"].pop("w"), r"lacks the 'step' of 'w', which has exp_avg, exp_avg_sq"),
        (lambda m: m["optimizers"]["0"]["scalars"]["v"].clear(), r"lacks the 'step' of 'v'"),
        (lambda m: _in(m, "w").__setitem__(0, "0:8:0:99999"), r"rank-00000.*\[0, 8\) of tensor 'w'.*file at byte"),
        (lambda m: _in(m, "w").__setitem__(0, "0:8:0:0") or _in(m, "v").__setitem__(0, "0:4:0:4"), r"'v'.*within what"),
        (lambda m: _in(m, "w").append("0:8:0:4096"), r"pieces of tensor 'w' .* end at element 0"),
        (lambda m: _in(m, "w").append("12:12:7:4096"), r"pieces-t/rank-00007.*no rank 7 saved|end at element 12 of 12"),
    ],
)  # fmt: skip
def test_what_does_not_belong_to_its_manifest_is_named(tmp_path: Path, change: Any, names: str) -> None:
    content = saved(tmp_path / "c")
    assert verify(tmp_path / "c").problems == ()
    change(content)
    resealed(tmp_path / "c", content)
    for look in (verify, open_any):
        with pytest.raises(ValueError, match=rf"c/manifest.json: .*{names}"):
            look(tmp_path / "c")


def _in(content: dict[str, Any], name: str) -> list[str]:
    found: list[str] = content["pieces"]["slices"]["model.safetensors"][name]
    return found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, name: t[name].update(shape=[2, 4]), "as torch.float32 (2, 4), the manifest as torch.float32 (8,)"),
        (lambda t, name: t[name].update(dtype="I32"), "as torch.int32 (8,), the manifest as torch.float32 (8,)"),
        (lambda t, name: t.update({f"{name}x": t.pop(name)}), "which the manifest has there"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("known", [False, True])
def test_a_piece_of_another_shape_is_named(tmp_path: Path, change: Any, says: str, known: bool) -> None:
    """Be it by damage, or with the checksum of that header in the manifest."""
    content = saved(tmp_path / "c")
    place = tmp_path / "c" / "pieces-t" / "rank-00000.safetensors"
    data = place.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:length])
    (name,) = (each for each in tensors if each.startswith("model.safetensors:w["))
    assert name == "model.safetensors:w[0:8]"
    change(tensors, name)
    header = data[:8] + json.dumps(tensors, separators=(",", ":")).encode().ljust(length - 8)
    place.write_bytes(header + data[length:])
    if known:
        content["pieces"]["ranks"]["0"][1] = checksum_of(header)
        resealed(tmp_path / "c", content)
    damaged, *problems = ("is damaged", *verify(tmp_path / "c").problems) if known else verify(tmp_path / "c").problems
    assert "is damaged" in damaged
    assert problems and f"{place}: " in problems[0] and "elements [0, 8) of tensor 'w' of model" in problems[0]
    assert says in problems[0]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer/exp_avg.safetensors"])
@pytest.mark.parametrize(
    ("blocks", "message"), [(None, "end at element 0 of 10"), (["0:10:{}"], "goes across a slice's end at 6")]
)
def test_what_no_checksum_covers_is_not_read(tmp_path: Path, file: str, blocks: list[str] | None, message: str) -> None:
    values = {"w": torch.arange(10.0), "v": torch.ones(2)}
    save(on_hosts([tmp_path / "c"] * 2), values, {"0": {"exp_avg": values}})
    place = tmp_path / "c" / "manifest.json"
    content = json.loads(place.read_text())
    tensors = content["checksums"]["tensors"][file]
    del tensors["w"]
    if blocks is not None:
        tensors["w"] = [block.format("0" * 16) for block in blocks]
    place.write_bytes(seal(json.dumps(content).encode()))
    with pytest.raises(ValueError, match=rf"c/{file}: .*'w' {message}"):
        open_any(tmp_path)
    (problem,) = verify(tmp_path).problems
    assert file in problem and message in problem
    with pytest.raises(ValueError, match=message):
        merge([tmp_path / "c"], tmp_path / "out")


def test_merge_refuses(tmp_path: Path) -> None:
    save(on_hosts(hosts(tmp_path / "x", 2), "x"), WEIGHTS)
    save(on_hosts(hosts(tmp_path / "y", 2), "y"), WEIGHTS)
    save(in_place(tmp_path / "plain", 2), WEIGHTS)
    one, two = tmp_path / "x/host0/c", tmp_path / "y/host1/c"
    with pytest.raises(ValueError, match=r"host1/c is of another save \(y\) than .*host0/c \(x\)"):
        merge([one, two], tmp_path / "out")
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([tmp_path / "plain"], tmp_path / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        merge([one, tmp_path / "x/host1/c"], tmp_path / "there")
    place = one / "pieces-x" / "rank-00000.safetensors"
    data = bytearray(place.read_bytes())
    data[-3] ^= 1
    place.write_bytes(data)
    with pytest.raises(ValueError, match=r"rank-00000.safetensors: tensor .* is damaged"):
        merge([one, tmp_path / "x/host1/c"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "plain", "there", "x", "y"]


def test_merge_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories = hosts(tmp_path, 2)
    save(on_hosts(directories), WEIGHTS, STATES)
    arguments = ["checkpoint", "merge", *map(str, directories), "--output", str(tmp_path / "out"), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["directory"] == str(tmp_path / "out") and found["ranks"] == 2
    assert main(arguments) == 2
    assert "exists already" in json.loads(capsys.readouterr().out)["error"]
    assert main(["checkpoint", "merge", str(directories[0]), "--output", str(tmp_path / "other")]) == 2
    assert "[1] are missing" in capsys.readouterr().err


def test_the_table_is_checked(tmp_path: Path) -> None:
    save(on_hosts([tmp_path / "c"] * 2), {"w": torch.arange(10.0)})
    text = (tmp_path / "c" / "manifest.json").read_text()
    content = json.loads(text)
    pieces = content["pieces"]
    for change, message in [
        ({"folder": "../x"}, "folder"),
        ({"ranks": {"0": [1, "x"]}}, "ranks"),
        ({"slices": {"model.safetensors": {"w": ["0:5:0:4096"]}}}, "end at element 5 of 10"),
        ({"slices": {"model.safetensors": {"w": ["0:5:0:4096", "5:10:9:4096"]}}}, "end at element 5 of 10"),
        ({"slices": {"model.safetensors": {"v": []}}}, "does not have"),
        ({"layouts": {}}, "without a layout"),
        ({"owners": {}}, "differ in"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            changed = json.dumps({**content, "pieces": {**pieces, **change}})
            _parse(changed)


def _parse(text: str) -> Manifest:
    from zero_strategy.checkpoint.manifest import seal

    return Manifest.from_json(seal(text.encode()), "manifest")
