"""Names of parameters, states and small files in checkpoints of anybody's: nothing is read or written elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.checkpoint.kinds import content, make
from tests.checkpoint.saving import save
from zero_strategy.checkpoint.layout import check_file_name, folders_above, is_inner_path
from zero_strategy.checkpoint.manifest import seal
from zero_strategy.cli import main
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.convert import universal as deepspeed_universal
from zero_strategy.convert.convert import open_any

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*were never updated")

ODD = ["", ".", "..", "/", "//", "/x", "x/", "../x", "../../x", "a/../../x", "a/./b", "\0", "a\0", "\n", " ", "\\"]
ODD += ["\ud800", "a\udfff", "\udc80", "x" * 255, "x" * 300, "\u00e9" * 150, "step", "fp32", "master", "C:\\x", "CON"]
ODD += ["a:b", "*", "~", "-", "--help", "W", "w", "\u0130", "\U0001f600", "__class__", "weights", "latest", ".written"]
ODD += ["optimizer_state.pt"]
names = st.one_of(st.sampled_from(ODD), st.text(st.sampled_from("ab./\\\0\ud83d\ude00W\n\u00df"), max_size=12))


def everything(folder: Path) -> dict[str, bytes | None]:
    """Path -> content; None of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@given(names)
def test_a_file_name_is_a_file_in_the_folder_or_refused(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("f")
    try:
        check_file_name(name, "parameter", ".pt")
    except ValueError as error:
        assert str(error).startswith("parameter ") and "cannot name a file: it " in str(error)
        str(error).encode()  # it can be shown
    else:
        (folder / f"{name}.pt").touch()
        (made,) = folder.iterdir()
        assert made.name == f"{name}.pt"


@given(st.lists(names, min_size=1, max_size=4))
def test_an_inner_path_stays_inside(parts: list[str]) -> None:
    path = "/".join(parts)
    if is_inner_path(path):
        resolved = os.path.normpath(os.path.join("/here", path))
        assert resolved == f"/here/{path}" and all(is_inner_path(folder) for folder in folders_above(path))


def run(*arguments: object) -> tuple[int, str]:
    """Exit status of `zero-strategy checkpoint ...`, and what it printed where only ASCII can be."""
    said = io.TextIOWrapper(io.BytesIO(), "ascii")
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(["checkpoint", *map(str, arguments)])
    said.seek(0)
    return status, said.read()


def torch_file(path: Path, *, weight: str, state: str, extra: str) -> None:
    """A file of torch.save with three names of anybody's choosing."""
    values = {"step": torch.tensor(1.0), "exp_avg": torch.ones(4)}
    groups = [{"params": [0], "lr": 0.1, "betas": (0.9, 0.99), "param_names": [weight]}]
    optimizer = {"state": {0: {**values, state: torch.full((4,), 2.0)}}, "param_groups": groups}
    content = {"model": {weight: torch.arange(4.0)}, "optimizer": optimizer, "extra_files": {extra: b"content"}}
    torch.save(content, path)


@pytest.mark.parametrize("target", ["native", "hf", "torch", "dcp", "deepspeed-universal"])
@settings(max_examples=60)
@given(weight=names, state=names, extra=names)
@example(weight="w", state="../../../precious", extra="x")
@example(weight="../../precious", state="s", extra="x")
@example(weight="w", state="s", extra="../precious.pt")
@example(weight="w", state="exp_avg", extra="model.safetensors/x")
def test_nothing_is_written_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, target: str, weight: str, state: str, extra: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "in" / "deep").mkdir(parents=True)
    torch_file(root / "in" / "deep" / "a.pt", weight=weight, state=state, extra=extra)
    for place in (root, root / "in"):
        torch.save({"precious": torch.ones(1)}, place / "precious.pt")
    before = everything(root)
    out = root / "in" / "deep" / "out"
    status, said = run("convert", out.parent / "a.pt", out, "--to", target, "--quiet")
    after = {path: content for path, content in everything(root).items() if not path.startswith("in/deep/out")}
    latest = after.pop("in/deep/latest_universal", None)
    assert after == before
    assert latest == (b"out" if out.exists() and target == "deepspeed-universal" else None)
    assert status == (0 if out.exists() else 2)
    if status:
        assert said.strip()
    else:
        found = {name: open_any(out).full(name) for name in open_any(out).weights}
        assert list(found) == [weight] and torch.equal(found[weight], torch.arange(4.0))


@settings(max_examples=60)
@given(names)
@example("../../precious")
@example("/etc")
def test_a_universal_checkpoint_is_read_from_its_folder_alone(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    for place in (root / "precious", root / "tag" / "zero" / "w"):
        place.mkdir(parents=True)
        torch.save({"param": torch.ones(4)}, place / "fp32.pt")
    torch.save({"param_groups": [{"params": [0]}]}, root / "tag" / "zero" / "optimizer_state.pt")
    model = {"module": {name: torch.ones(4)}, "param_shapes": [{name: torch.Size((4,))}]}
    torch.save(model, root / "tag" / "mp_rank_00_model_states.pt")
    if name == "w":
        assert list(deepspeed_universal.read(root / "tag").weights) == ["w"]
    else:
        with pytest.raises(ValueError, match=r"tag: parameter .*(cannot name a file|has no fp32.pt)"):
            deepspeed_universal.read(root / "tag")
    (root / "latest_universal").write_text(name, errors="surrogatepass")
    if name.strip() != "tag":
        assert run("inspect", root)[0] == 2


@pytest.mark.parametrize("section", ["weights", "files", "optimizers", "aliases", "user"])
@settings(max_examples=30)
@given(names)
def test_a_manifest_with_any_name_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, section: str, name: str
) -> None:
    place = tmp_path_factory.mktemp("c") / "c"
    save(place, {"w": torch.ones(3)}, {"adam": {"exp_avg": {"w": torch.ones(3)}}})
    content = json.loads((place / "manifest.json").read_text())
    value = {"user": 1, "aliases": "w"}.get(section) or next(iter(content[section].values()))
    content[section] = {**content[section], name: value}
    (place / "manifest.json").write_bytes(seal(json.dumps(content).encode()))
    for command in ("inspect", "verify"):
        assert run(command, place)[0] in (0, 1, 2)
    try:
        reader = open_any(place)
    except ValueError as error:
        assert str(place) in str(error)
    else:
        assert torch.equal(reader.full("w"), torch.ones(3))


def test_an_existing_folder_of_another_name_is_that_of_an_equal_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answer of a file system that takes "W" and "w" for one name."""
    torch_file(tmp_path / "a.pt", weight="w", state="exp_avg_sq", extra="x")
    state = open_any(tmp_path / "a.pt").state  # type: ignore[attr-defined]
    make = Path.mkdir

    def taken(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.name == "w":
            raise FileExistsError(str(self))
        make(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", taken)
    with pytest.raises(ValueError, match="parameter 'w' and another one have names that are one to this file system"):
        deepspeed_universal.write(state, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


def places_in(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Place in nested dictionaries and lists: keys from the outermost on."""
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(*above, key), *places_in(value[key], (*above, key))]]


@pytest.mark.parametrize("kind", ["native", "pieces"])
def test_a_manifest_with_anything_anywhere_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    """Each entry in turn is left out, renamed, or of another type, under a right checksum."""
    place = make(kind, tmp_path)
    text = (place / "manifest.json").read_text()
    for number, where in enumerate(places_in(json.loads(text))):
        for change in ("drop", "rename", None, "x", -1, [], {"zz": 1})[number % 2 :: 2]:  # half of them, in turn
            changed = inside = json.loads(text)
            for key in where[:-1]:
                inside = inside[key]
            if change == "drop" or (change == "rename" and isinstance(inside, list)):
                del inside[where[-1]]
            elif change == "rename":
                inside["ghost"] = inside.pop(where[-1])
            else:
                inside[where[-1]] = change
            (place / "manifest.json").write_bytes(seal(json.dumps(changed).encode()))
            for look in (content, verify):
                try:
                    look(place)
                except ValueError as error:
                    assert str(place) in str(error), (where, change, error)
