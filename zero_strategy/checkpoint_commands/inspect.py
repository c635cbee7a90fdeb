"""`zero-strategy checkpoint inspect`."""

from __future__ import annotations

import argparse
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_strategy.runtime.terminal import parser_for, size, table

if TYPE_CHECKING:
    from zero_strategy.checkpoint.state_reader import StateReader


def add(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "inspect",
        "what a checkpoint holds",
        "Shows a checkpoint of any format: files, tensors, optimizers, counters. Tensors are not read.\n"
        "Exit status: 0, or 2 if there is no complete checkpoint.",
        "  zero-strategy checkpoint inspect runs/step200\n"
        "  zero-strategy checkpoint inspect runs --tensors 'blocks.0.*'\n"
        "  zero-strategy checkpoint inspect lightning.ckpt --json",
    )
    parser.add_argument("path", help="a checkpoint of any format, or the folder with `latest`")
    parser.add_argument(
        "--tensors", nargs="?", const="*", metavar="PATTERN", help="list tensors: all, or those that fit '*.bias'"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    from zero_strategy.checkpoint.open_any import NATIVE, foreign_format, open_any

    reader = open_any(options.path, verify=False)
    foreign = foreign_format(options.path)
    kind = foreign.name if foreign else NATIVE if reader.has_manifest else "plain weights"
    found = describe(reader, kind, options.tensors)
    print(json.dumps(found, indent=1, default=str) if options.json else _text(found))
    return 0


def describe(reader: StateReader, kind: str, pattern: str | None) -> dict[str, Any]:
    """What `--json` prints."""
    specs = reader.weights
    dtypes: dict[str, int] = {}
    for spec in specs.values():
        dtypes[_dtype(spec.dtype)] = dtypes.get(_dtype(spec.dtype), 0) + spec.numel
    files = _files(reader)
    found: dict[str, Any] = {
        "path": str(reader.directory),
        "format": kind,
        "bytes": sum(files.values()),
        "files": files,
        "weights": {
            "tensors": len(specs),
            "elements": sum(spec.numel for spec in specs.values()),
            "bytes": sum(spec.nbytes for spec in specs.values()),
            "elements_by_dtype": dtypes,
        },
        "ties": dict(reader.aliases),
        "optimizers": [],
    }
    if reader.has_manifest:
        manifest = reader.manifest
        names = sorted(manifest.optimizers, key=lambda name: (len(name), name))
        found["optimizers"] = [_optimizer(reader, name) for name in names]
        found |= {"counters": dict(manifest.counters), "user": dict(manifest.user)}
        if kind == "native":
            found |= {"world_size": manifest.world_size, "stage": manifest.stage}
    if pattern is not None:
        found["tensors"] = _tensors(reader, pattern)
    return found


def _files(reader: StateReader) -> dict[str, int]:
    root = reader.directory
    if isinstance(root, str):  # a URL
        return dict(reader.manifest.files)
    if root.is_file():
        return {root.name: root.stat().st_size}
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.stat().st_size for path in paths}


def _optimizer(reader: StateReader, name: str) -> dict[str, Any]:
    record, states = reader.manifest.optimizers[name], reader.states(name)
    found = [values.get("step") for values in record.scalars.values()]
    steps = sorted({float(step) for step in found if isinstance(step, (int, float))})
    return {
        "name": name,
        "groups": [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            | {"parameters": len(group["params"])}
            for group in record.param_groups
        ],
        "states": {
            kind: {"tensors": len(specs), "bytes": sum(spec.nbytes for spec in specs.values())}
            for kind, specs in states.items()
        },
        "steps": [steps[0], steps[-1]] if steps else [],
    }


def _tensors(reader: StateReader, pattern: str) -> list[dict[str, Any]]:
    kinds: list[Any] = ["model"]
    if reader.has_manifest:
        kinds += [(name, kind) for name in reader.manifest.optimizers for kind in reader.states(name)]
    found = []
    for kind in kinds:
        specs = reader.weights if kind == "model" else reader.states(kind[0])[kind[1]]
        for name, spec in specs.items():
            if fnmatchcase(name, pattern):
                where = "model" if kind == "model" else f"optimizer {kind[0]} {kind[1]}"
                entry = {"where": where, "name": name, "dtype": _dtype(spec.dtype), "shape": list(spec.shape)}
                found.append({**entry, "bytes": spec.nbytes, "file": reader.file_of(name, kind)})
    return found


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _text(found: dict[str, Any]) -> str:
    weights = found["weights"]
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in weights["elements_by_dtype"].items())
    rows = [
        ("path", found["path"]),
        ("format", found["format"]),
        ("size", f"{size(found['bytes'])} in {len(found['files'])} file(s)"),
        ("weights", f"{weights['tensors']} tensors, {size(weights['bytes'])}: {dtypes or 'no elements'}"),
    ]
    if "world_size" in found:
        rows.append(("saved by", f"{found['world_size']} rank(s), stage {found['stage']}"))
    rows += [(f"counter {name}", str(value)) for name, value in found.get("counters", {}).items()]
    rows += [(f"tie {alias}", name) for alias, name in found["ties"].items()]
    for entry in found["optimizers"]:
        rows += _optimizer_rows(entry)
    rows += [(f"user {key}", _short(value)) for key, value in found.get("user", {}).items()]
    parts = [table(rows), table([(name, size(n)) for name, n in found["files"].items()], ("file", "size"), right=(1,))]
    if found.get("tensors"):
        header = ("where", "name", "dtype", "shape", "size", "file")
        lines = [
            (t["where"], t["name"], t["dtype"], t["shape"], size(t["bytes"]), Path(t["file"]).name or "-")
            for t in found["tensors"]
        ]
        parts.append(table(lines, header, right=(4,)))
    return "\n\n".join(parts)


def _optimizer_rows(entry: dict[str, Any]) -> list[tuple[str, str]]:
    name = f"optimizer {entry['name']}"
    rows = [
        (f"{name} {kind}", f"{state['tensors']} tensors, {size(state['bytes'])}")
        for kind, state in entry["states"].items()
    ]
    if entry["steps"]:
        low, high = entry["steps"]
        rows.append((f"{name} steps", f"{low:g}" if low == high else f"{low:g} to {high:g}"))
    for number, group in enumerate(entry["groups"]):
        rows.append((f"{name} group {number}", ", ".join(f"{key}={_short(value)}" for key, value in group.items())))
    return rows


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
