"""`zero-strategy checkpoint inspect | diff | convert | prune`: exit statuses, JSON, tables."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.saving import same, save
from tests.convert.foreign import check, our_checkpoint, trained
from tests.convert.test_portable import ADAM, MODEL, RECORDS, tensor_files
from zero_strategy.checkpoint.reader import CheckpointReader
from zero_strategy.cli import main
from zero_strategy.cli.diff_checkpoints import compare
from zero_strategy.convert.convert import convert, open_any, state_of
from zero_strategy.convert.portable import loaded, portable_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    save(tmp_path / "ours", MODEL, {"0": ADAM}, world_size=2, manifest=RECORDS, aliases={"tied": "half"})
    return tmp_path / "ours"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """Exit status, and what was printed as JSON."""
    status = main(["checkpoint", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


# ---- inspect ----


def test_inspect(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(capsys, "inspect", ours, "--tensors", "[hs]*")
    assert status == 0 and found["format"] == "native" and found["ties"] == {"tied": "half"}
    assert found["bytes"] == sum(p.stat().st_size for p in ours.rglob("*") if p.is_file())
    assert found["weights"]["tensors"] == 5 and found["weights"]["elements_by_dtype"]["bfloat16"] == 35
    assert found["counters"] == {"global_steps": 12} and found["user"]["mine"] == [1]
    (optimizer,) = found["optimizers"]
    assert optimizer["states"]["master"]["tensors"] == 2 and optimizer["steps"] == [6.0, 7.0]
    assert optimizer["groups"][0]["parameters"] == 3
    assert {(t["where"], t["name"], t["file"]) for t in found["tensors"]} == {
        ("model", "scalar", "model.safetensors"),
        ("model", "half", "model.safetensors"),
        ("optimizer 0 exp_avg", "half", "optimizer/exp_avg.safetensors"),
        ("optimizer 0 master", "half", "optimizer/master.safetensors"),
    }
    assert main(["checkpoint", "inspect", str(ours.parent), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "optimizer 0 group 0" in text and "lr=0.30000000000000004" in text and "[5, 7]" in text


def test_inspect_foreign_and_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    status, found = run(capsys, "inspect", tmp_path / "x.pt")
    assert status == 0 and found["format"] == "torch" and found["ties"] == {"head.weight": "embed.weight"}
    assert found["optimizers"][0]["steps"] == [3.0, 3.0]
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert run(capsys, "inspect", tmp_path)[1]["format"] == "plain weights"
    assert main(["checkpoint", "inspect", str(tmp_path / "nothing")]) == 2
    assert "no such file" in capsys.readouterr().err


# ---- diff ----


def test_equal_checkpoints(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(ours, tmp_path / "x.pt", to_format="torch")
    for other in (ours, tmp_path / "x.pt"):
        status, found = run(capsys, "diff", ours, other)
        assert (status, found["tensors"], found["equal"], found["differences"]) == (0, 10, 10, [])
    assert main(["checkpoint", "diff", str(ours), str(tmp_path / "nothing")]) == 2


def test_every_kind_of_difference(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = torch.tensor([1.0, 2.0, 3.0, math.nan, 0.0, -0.0, 7.0])
    other = torch.tensor([1.0, 2.5, 3.0, math.nan, -0.0, -0.0, 6.0])
    save(tmp_path / "a", {"w": full, "s": torch.ones(2), "d": torch.ones(3), "x": torch.ones(1)}, manifest=RECORDS)
    save(tmp_path / "b", {"w": other, "s": torch.ones(3), "d": torch.ones(3).half(), "y": torch.ones(1)})
    status, found = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    by_name = {(entry["where"], entry["name"]): entry for entry in found["differences"]}
    assert status == 1 and (found["tensors"], found["equal"]) == (3, 0)
    values = by_name["model", "w"]
    assert (values["what"], values["elements"], values["numel"]) == ("values", 3, 7)  # the sign of zero counts
    assert values["max_abs"] == 1.0 and values["max_rel"] == pytest.approx(0.2)
    assert by_name["model", "s"]["what"] == "shape" and by_name["model", "s"]["b"] == "[3]"
    assert by_name["model", "d"]["what"] == "dtype" and by_name["model", "d"]["elements"] == 0
    assert by_name["model", "x"]["what"] == "only in A" and by_name["model", "y"]["what"] == "only in B"
    assert by_name["counters", "global_steps"]["what"] == "only in A"
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--weights-only")[0] == 1
    assert main(["checkpoint", "diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "w: 3 of 7 elements differ" in capsys.readouterr().out


def test_moments_and_hyper_parameters_differ(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = portable_of(CheckpointReader(ours))
    changed = {kind: {name: t.clone() for name, t in tensors.items()} for kind, tensors in ADAM.items()}
    changed["exp_avg"]["full"] = torch.full((7,), math.inf)
    records = {**RECORDS, "param_groups": {"0": [{**state.optimizers[0].param_groups[0], "lr": 0.5}]}}
    records |= {"scalars": {"0": {"half": {"step": 8.0}, "full": {"step": 6.0}, "last": {"step": 7.0}}}}
    save(tmp_path / "b", MODEL, {"0": changed}, manifest=records, aliases={"tied": "half"})
    status, found = run(capsys, "diff", ours, tmp_path / "b")
    assert status == 1
    assert [(e["where"], e["name"], e["a"], e["b"]) for e in found["differences"]] == [
        ("optimizer 0 exp_avg", "full", "", ""),
        ("optimizer 0 groups", "0.lr", "0.30000000000000004", "0.5"),
        ("optimizer 0 numbers", "half.step", "7.0", "8.0"),
    ]
    assert found["differences"][0]["max_abs"] == "inf" and found["differences"][0]["elements"] == 7


def test_all_dtypes_compare(tmp_path: Path) -> None:
    from tests.checkpoint.saving import all_dtypes

    tensors = all_dtypes()
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in changed.values():
        flat = tensor.view(-1).view(torch.uint8)
        flat[0] = 1 - flat[0] if tensor.dtype == torch.bool else flat[0] ^ 1
    save(tmp_path / "a", tensors)
    save(tmp_path / "b", changed)
    found = compare(open_any(tmp_path / "a"), open_any(tmp_path / "b"))
    assert {entry.name for entry in found.differences} == tensors.keys()
    assert all(entry.elements == 1 for entry in found.differences)


# ---- convert ----


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_there_and_back_is_byte_identical(ours: Path, tmp_path: Path, kind: str) -> None:
    same_dtype = {name: tensor.float() for name, tensor in MODEL.items()}
    states = {"0": {"exp_avg": ADAM["exp_avg"]}}
    ties = {} if kind == "dcp" else {"tied": "half"}  # torch.distributed.checkpoint knows none
    save(ours, same_dtype, states, manifest=RECORDS, aliases=ties)
    assert main(["checkpoint", "convert", str(ours), str(tmp_path / "there"), "--to", kind]) == 0
    assert main(["checkpoint", "convert", str(tmp_path / "there"), str(tmp_path / "back")]) == 0
    assert tensor_files(tmp_path / "back") == tensor_files(ours)
    assert compare(open_any(ours), open_any(tmp_path / "back")).differences == []


def test_convert_refuses_and_leaves_nothing(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(os.listdir(tmp_path))
    (tmp_path / "taken").touch()
    for arguments, message in [
        ((ours, tmp_path / "taken"), "exists; it will not be overwritten"),
        ((ours, tmp_path / "new", "--to", "accelerate"), "cannot write 'accelerate'; known: native, hf"),
        ((ours, tmp_path / "new", "--from", "x"), "unknown checkpoint format 'x'"),
        ((ours, tmp_path / "new", "--prefix", "a."), "have no meaning for the format 'native'"),
        ((tmp_path / "nothing", tmp_path / "new"), "no such file"),
        ((ours, tmp_path / "new", "--tag", "t"), "t"),
    ]:
        assert main(["checkpoint", "convert", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "taken").unlink()
    assert sorted(os.listdir(tmp_path)) == before
    file = ours / "optimizer" / "exp_avg.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for kind in ("native", "torch", "dcp"):
        assert main(["checkpoint", "convert", str(ours), str(tmp_path / "new"), "--to", kind]) == 2
        assert "is damaged" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == before


def test_dtypes_with_and_without_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained()
    our_checkpoint(model, optimizer, tmp_path / "ours")
    narrow = convert(tmp_path / "ours", tmp_path / "bf16", dtype=torch.bfloat16)
    whole = model.state_dict()
    for name, tensor in narrow.weights.items():
        expected = whole[name].bfloat16() if whole[name].is_floating_point() else whole[name]
        assert same(loaded(tensor), expected)
    trained_names = {n for n, p in model.named_parameters() if p.requires_grad}
    masters = state_of(open_any(tmp_path / "bf16")).optimizers[0].kinds["master"]
    assert masters.keys() == trained_names and all(same(loaded(t), whole[n]) for n, t in masters.items())
    convert(tmp_path / "bf16", tmp_path / "fp32", dtype=torch.float32)
    again = state_of(open_any(tmp_path / "fp32"))
    assert "master" not in again.optimizers[0].kinds
    assert all(same(loaded(again.weights[name]), whole[name]) for name in trained_names)


def test_to_hugging_face(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ours / "config.json").write_text("{}")
    status, found = run(
        capsys, "convert", ours, tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16", "--max-file-size", "60B"
    )
    assert status == 0 and found["optimizers"] == 0
    names = sorted(os.listdir(tmp_path / "hf"))
    assert names[0] == "config.json" and "manifest.json" not in names and len(names) > 4
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    tensors = {n: t for file in set(index["weight_map"].values()) for n, t in load_file(tmp_path / "hf" / file).items()}
    assert tensors.keys() == MODEL.keys() and {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_names_for_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def swapped(model: Any) -> torch.optim.Optimizer:
        groups = [{"params": [model.layers[1].weight]}, {"params": [model.layers[0].weight]}]
        return torch.optim.AdamW(groups, foreach=False)

    model, optimizer = trained(swapped)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    assert main(["checkpoint", "convert", str(tmp_path / "x.pt"), str(tmp_path / "new")]) == 2
    assert "--names" in capsys.readouterr().err and not (tmp_path / "new").exists()
    (tmp_path / "names.json").write_text(json.dumps([["layers.1.weight"], ["layers.0.weight"]]))
    arguments = [str(tmp_path / "x.pt"), str(tmp_path / "new"), "--names", str(tmp_path / "names.json")]
    assert main(["checkpoint", "convert", *arguments]) == 0
    check(state_of(open_any(tmp_path / "new")), model, optimizer)


# ---- prune ----


def test_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, 5):
        save(tmp_path / f"s{number}", {"w": torch.ones(2)}, manifest={"counters": {"global_steps": number}})
        os.utime(tmp_path / f"s{number}" / "manifest.json", ns=(number, number))
    status, found = run(capsys, "prune", tmp_path, "--keep-last", 1, "--keep-every", 2, "--dry-run")
    assert status == 0 and [e["name"] for e in found["checkpoints"] if e["removed"]] == ["s1", "s3"]
    assert len(list(tmp_path.glob("s*"))) == 4
    assert main(["checkpoint", "prune", str(tmp_path), "--keep-last", "1", "--keep-every", "2"]) == 0
    assert "2 of 4 removed" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.glob("s*")) == ["s2", "s4"]
    assert main(["checkpoint", "prune", str(tmp_path), "--keep-last", "0"]) == 2
    assert main(["checkpoint", "prune", str(tmp_path / "nothing"), "--keep-last", "1"]) == 2


@pytest.mark.parametrize("action", ["inspect", "verify", "diff", "convert", "prune"])
def test_help_has_examples(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", action, "--help"])
    assert left.value.code == 0
    assert f"zero-strategy checkpoint {action}" in capsys.readouterr().out.split("examples:")[1]
