"""`zero-strategy config explain`."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from typing import Any

from zero_strategy.config import DeepSpeedSettings, Setting, ZeroConfig, load_config, resolve
from zero_strategy.config.deepspeed_json import inspect_deepspeed
from zero_strategy.config.load import config_of, read_layer
from zero_strategy.runtime.terminal import table

_AUTO = "auto"


def add(actions: Any) -> None:
    """Adds the action."""
    parser = actions.add_parser(
        "explain",
        help="every setting that a file leads to, and what becomes of its keys",
        description=(
            "Shows the settings that a config file leads to and where each comes from; for DeepSpeed's JSON also the\n"
            "batch sizes, and for every key whether it is translated, accepted without effect, or rejected.\n"
            "Exit status: 0; 1 if a key is rejected, so that training would refuse the file; 2 if it cannot be read."
        ),
        epilog=(
            "examples:\n  zero-strategy config explain ds_config.json --world 8\n"
            "  zero-strategy config explain zero.yaml --json"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", help="DeepSpeed's JSON (also as base64), or a YAML file of ours")
    parser.add_argument("--world", type=int, metavar="RANKS", help="number of ranks, to derive what depends on it")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    layer = read_layer(options.file)
    deepspeed = inspect_deepspeed(layer) if layer.is_deepspeed else None
    if deepspeed is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = load_config(options.file)
    else:
        config = config_of(deepspeed)
    settings = dict(_settings(config, options.world))
    owned = {} if deepspeed is None else dict(_owned(deepspeed, options.world))
    print(_json(settings, owned, deepspeed) if options.json else _text(settings, owned, deepspeed))
    return int(deepspeed is not None and bool(deepspeed.rejected()))


def _settings(config: ZeroConfig, world: int | None) -> Iterator[tuple[str, Setting]]:
    if world is None:
        yield from config.settings()
        return
    for key, setting in resolve(config, world).settings():
        yield key, setting._replace(origin="--world") if key == "world_size" else setting


def _owned(found: DeepSpeedSettings, world: int | None) -> Iterator[tuple[str, Setting]]:
    """What a framework or a script owns, as far as the file says it."""
    batch, reports = found.batch, {report.key: report for report in found.found}
    enough = batch.train_batch_size is not None or batch.train_micro_batch_size_per_gpu is not None
    stages = found.zero["pipeline.stages"].value if "pipeline.stages" in found.zero else 1
    resolved = batch.resolve(world // stages) if world is not None and enough else batch
    derived = f"derived: world size {world}" + (f" / {stages} pipeline stages" if stages > 1 else "")
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = getattr(resolved, name)
        if name in reports and (value is None or getattr(batch, name) is not None):
            yield name, Setting(_AUTO if value is None else value, f"{found.origin}: {reports[name].path}")
        else:
            yield name, Setting(value, "not set" if value is None else derived)
    for name, setting in (("gradient_clipping", found.gradient_clipping), ("computation", found.precision)):
        yield name, setting._replace(value=_AUTO) if setting.value is None else setting
    for name, named in (("optimizer", found.optimizer), ("scheduler", found.scheduler)):
        if named is not None:
            arguments = ", ".join(f"{key}={value!r}" for key, value in named.params.items())
            yield name, Setting(f"{named.type}({arguments})", named.origin)


def _json(settings: dict[str, Setting], owned: dict[str, Setting], found: DeepSpeedSettings | None) -> str:
    made: dict[str, Any] = {"settings": {key: setting._asdict() for key, setting in settings.items()}}
    if found is not None:
        made["owned by the framework or the script"] = {key: setting._asdict() for key, setting in owned.items()}
        names = ("path", "value", "classification", "note", "ours")
        made["keys"] = [{name: getattr(report, name) for name in names} for report in found.found]
    return json.dumps(made, indent=1, default=str)


def _text(settings: dict[str, Setting], owned: dict[str, Setting], found: DeepSpeedSettings | None) -> str:
    parts = [_rows(settings)]
    if found is not None:
        rows = [
            (report.path, _cell(report.value), report.classification, _becomes(report.ours, report.note))
            for report in found.found
        ]
        parts += [
            "\nowned by the framework or the script; what is not auto must agree with theirs:\n" + _rows(owned),
            "\nkeys of the file:\n" + table(rows, ("key", "value", "what becomes of it", "how, or why")),
        ]
        rejected = len(found.rejected())
        if rejected:
            parts.append(f"\n{rejected} key(s) rejected: training refuses this file")
    return "\n".join(parts)


def _rows(settings: dict[str, Setting]) -> str:
    rows = [(key, _cell(setting.value), setting.origin) for key, setting in settings.items()]
    return table(rows, ("key", "value", "origin"))


def _cell(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _becomes(ours: str, note: str) -> str:
    return f"{ours}: {note}" if ours and note else ours or note
