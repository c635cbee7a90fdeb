"""Write the pages of docs/reference that are made of the code: `settings.md` and `command_line.md`.

Keys, types, defaults and accepted values come from `ZeroConfig`, the help of commands from their parsers. Meanings and
examples are below, one for each key; a key without them, or with an example that is refused, is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = "docs/reference/settings.md"
COMMANDS = "docs/reference/command_line.md"
ROW = 200
HELP_WIDTH = "100"

MEANINGS: dict[str, tuple[str, str]] = {
    "stage": ("ZeRO stage: 1 divides optimizer state, 2 also gradients, 3 also parameters", "2"),
    "gradient_reduction": (
        "when gradients are reduced; none: per step at stages 0 and 1, else per micro-batch",
        "per_step",
    ),
    "uneven_batches": ("ranks that run out of batches: an error, or they count with weight 0", "join"),
    "prefetch": ("stage 3: units that are gathered ahead of their use", "2"),
    "reshard_after_forward": ("stage 3: free gathered parameters between forward and backward", "false"),
    "reshard_after_backward": ("stage 3: free them after backward; false: keep them until an optimizer steps", "false"),
    "broadcast_buffers": ("rank 0 sends buffers that a forward has changed to all ranks, as DDP does", "false"),
    "nonfinite_gradients": ("a step whose gradients are not all finite is taken, skipped, or an error", "skip"),
    "matrix_optimizers": ("optimizers that need whole matrices, which then lie on one rank each", "[Shampoo]"),
    "matrix_parameters": ("patterns of the names of matrices that have buckets of their own", '["*.mlp.*.weight"]'),
    "elementwise_optimizers": ("own optimizers that treat every element by itself, and are not tried", "[MyAdam]"),
    "fused_optimizers": ("step torch's Adam, AdamW, SGD and Adagrad with the fused ops", "false"),
    "mmap_threshold": ("bytes from which a block of host memory is mapped on its own; 0: as glibc decides", "131072"),
    "timeout_seconds": ("time limit of a collective of the process group", "600"),
    "barrier_seconds": ("time limit of this package's own waits for other ranks", "120"),
    "units.classes": ("class names of the modules that are gathered and released as one; none: found", "[Block]"),
    "units.patterns": ("name patterns of these modules", '["model.layers.*"]'),
    "units.min_numel": ("modules that were found and have fewer elements stay with their parent", "100000"),
    "units.may_skip": ("ranks may skip different layers of a ModuleList at stage 3 (LayerDrop)", "true"),
    "mesh.replicate": ("hybrid sharding: number of copies of the divided state", "4"),
    "mesh.shard": ("hybrid sharding: ranks that share one copy; none: world size / replicate / tensor", "8"),
    "mesh.sequence": ("ranks that divide the tokens of the same sequences", "4"),
    "mesh.ulysses": ("of these, ranks that exchange tokens for heads; none: all of them", "2"),
    "mesh.expert": ("neighbouring ranks that divide the experts of each layer; tokens travel to them", "8"),
    "communication.parameters": (
        "what is sent: values; changes (stages 1, 2); what layers cast weights to (stage 3)",
        "delta",
    ),
    "mesh.tensor": ("ranks that divide each layer; none: as the model's DTensors say, else 1", "2"),
    "precision.master_weights": ("keep fp32 copies of bf16 and fp16 parameters for the optimizer", "false"),
    "precision.gradient_dtype": (
        "dtype that gradients are accumulated in; `parameter`: that of each parameter",
        "parameter",
    ),
    "precision.reduce_dtype": (
        "dtype that gradients are summed in across ranks; `gradient`: the one they have",
        "gradient",
    ),
    "optimizer.state_bits": ("bits of moments and momenta of AdamW, Adam, Lion and SGD", "8"),
    "optimizer.keep_32_bits": ("patterns of the names of parameters whose states keep 32 bits", '["*embed*"]'),
    "loss_scale.initial": ("fp16: loss scale at the first step", "4096.0"),
    "loss_scale.growth_factor": ("fp16: factor on the scale after `growth_interval` steps without overflow", "4.0"),
    "loss_scale.backoff_factor": ("fp16: factor on the scale after a step that overflowed", "0.25"),
    "loss_scale.growth_interval": ("fp16: steps without overflow before the scale grows", "500"),
    "loss_scale.growth_delay": ("fp16: extra steps at the start and after an overflow; DeepSpeed has 1", "1"),
    "loss_scale.minimum": ("fp16: the scale never falls below it; an overflow at it is an error", "128.0"),
    "loss_scale.hysteresis": ("fp16: number of the overflow since the last growth that first lowers the scale", "2"),
    "loss_scale.consecutive_hysteresis": (
        "fp16: overflows for `hysteresis` are counted anew after each step without one",
        "true",
    ),
    "offload.optimizer": ("place of optimizer state and master weights", "cpu"),
    "offload.optimizer_ratio": ("part of each bucket's optimizer state that leaves the device", "0.5"),
    "offload.parameters": ("stage 3: place of this rank's part of the parameters", "cpu"),
    "offload.gradients": ("place of reduced gradients until the step; none: the optimizer's where possible", "cpu"),
    "offload.activations": ("place of saved activations until backward; no effect if training is on the CPU", "cpu"),
    "offload.nvme_path": ("directories on NVMe drives; state is striped over several", "[/local_nvme]"),
    "offload.staging_bytes": ("host memory per rank through which state in files passes during a step", "536870912"),
    "offload.resident_bytes": ("host memory per rank for parameters and gradients whose place is `nvme`", "8000000000"),
    "offload.checksums": ("checksum all that is in files, and compare it at each read", "true"),
    "offload.probe_seconds": ("time for measuring the drive at the start; 0: do not measure", "0"),
    "activation_checkpointing.mode": ("activations to compute again in backward", "selective"),
    "activation_checkpointing.every_n": ("mode `every_n`: one unit in so many is computed again", "3"),
    "activation_checkpointing.tile_tokens": ("tokens of an MLP and of the loss that are computed at a time", "4096"),
    "activation_checkpointing.budget": (
        "mode `budget`: share of mode `none`'s bytes that may be kept; none: 0.5",
        "0.6",
    ),
    "pipeline.stages": ("ranks that one copy of the model is divided among", "4"),
    "pipeline.schedule": ("order of forwards and backwards: see `zero-strategy schedule list`", "zb_h1"),
    "pipeline.chunks": ("parts of the model per rank; none: 2 for interleaved schedules and zbv, else 1", "2"),
    "pipeline.micro_batches": ("micro-batches of a step; none: accumulation steps, else the number of stages", "8"),
    "pipeline.partition": ("what stages share equally: `uniform`, `parameters`, `profile`, `type:REGEX`", "uniform"),
    "pipeline.gather": ("stage 3: how often a unit's parameters are gathered", "per_step"),
    "pipeline.gather_bytes": ("stage 3: bytes of full parameters that a rank may hold during a step", "2000000000"),
    "pipeline.timeline": ("file in which rank 0 records who did what when", "timeline.jsonl"),
    "checkpoint.max_file_bytes": ("bytes of tensors after which a new file is begun", "2000000000"),
    "checkpoint.layout": ("ranks write into shared files, or into one file each (`pieces`)", "pieces"),
    "checkpoint.format": ("a directory that all ranks write, or one Lightning file that rank 0 writes", "file"),
    "checkpoint.asynchronous": ("saves of a framework's checkpoint callbacks go on in the background", "false"),
    "checkpoint.while_saving": ("a second save waits for the first, or is refused", "refuse"),
    "checkpoint.bytes_per_second": ("limit on each rank's writing speed in the background; 0: none", "200000000"),
    "checkpoint.timeout_seconds": ("time that another rank may show no sign of work during a save", "600"),
    "checkpoint.keep_last": ("number of newest checkpoints of a folder to keep; 0: all", "3"),
    "checkpoint.keep_every": ("also keep checkpoints whose step is a multiple of it; 0: none", "1000"),
    "checkpoint.frozen": ("store parameters without gradient, or only a digest of each", "reference"),
    "checkpoint.random_state": ("restore each rank's random state when resuming", "false"),
    "checkpoint.preemption_signals": ("signals that make a `fit` save `preempted.ckpt`", "[SIGUSR1]"),
    "checkpoint.verify": ("compare checksums of all that is loaded", "false"),
    "watchdog.mode": ("watch for failed or diverging ranks; `strict` compares every collective", "strict"),
    "watchdog.wait_seconds": ("time without progress before ranks tell each other where they are", "10"),
    "watchdog.silence_seconds": ("how long a stopped or failed rank may stay silent before the others give up", "20"),
    "watchdog.unheard_seconds": ("the same for a rank on another host that nobody has heard of", "120"),
    "diagnostics.run_dir": (
        "directory in which every rank records its steps; empty: nothing is measured",
        "runs/today",
    ),
    "diagnostics.every_n_steps": ("one step in so many is recorded", "10"),
    "diagnostics.memory_every_n_steps": ("one recorded step in so many has memory by category; 0: none", "50"),
    "diagnostics.trace_steps": ("so many of the first recorded steps keep every interval", "2"),
    "diagnostics.flops": ("count the floating-point operations of a step", "false"),
    "diagnostics.peak_tflops": ("peak of the device for MFU, in TFLOP/s; 0: from a table", "312"),
    "diagnostics.measure_peak": ("measure the peak if the table does not know the device", "true"),
    "diagnostics.log": ("send recorded figures to the framework's loggers", "false"),
    "diagnostics.journal": ("with slots: write down the bits of each step, for `zero-strategy replay`", "false"),
    "diagnostics.journal_weights_every_n_steps": (
        "one step in so many has digests of the weights in the journal; 0: none",
        "10",
    ),
    "diagnostics.journal_elements": ("elements of each unit's output that the journal looks at; 0: all", "0"),
    "diagnostics.journal_factory": ("factory that makes the same training again, for a replay", "train.py:factory"),
    "reproducible.slots": (
        "micro-batches of a step, over all ranks, whose bits do not depend on the ranks; 0: off",
        "8",
    ),
    "reproducible.seed": ("of the random numbers of slots; none: torch's initial seed on rank 0", "42"),
    "auto.enabled": ("choose what nobody has set, for model, ranks and memory", "true"),
    "auto.global_batch": ("rows of a step over all ranks, of which micro-batches are made; 0: as they come", "64"),
    "auto.margin": ("part of the memory that stays free", "0.2"),
    "survive.enabled": ("go on in the same processes when some of them die, and take new ones in", "true"),
    "survive.wait_seconds": ("longest wait for others where those who are left cannot go on alone", "3600"),
}
SECTIONS = {
    "": ("Sharding and optimizers", "Keys of the top level."),
    "units": ("units", "The modules that are gathered and released as one, usually transformer blocks."),
    "communication": ("communication", "Messages between ranks."),
    "mesh": ("mesh", "Layout of the ranks: replicate x shard x tensor x pipeline stages = world size."),
    "precision": ("precision", "Dtypes of state. The precision of the computation is the framework's setting."),
    "optimizer": ("optimizer", "Form of states: see [states of 8 bits](../guides/optimizers.md#states-of-8-bits)."),
    "loss_scale": ("loss_scale", "Dynamic loss scaling, used when the framework trains in fp16."),
    "offload": ("offload", "State outside of the device's memory: see [offloading](../guides/offloading.md)."),
    "activation_checkpointing": (
        "activation_checkpointing",
        "See [activation checkpointing](../guides/activation_checkpointing.md).",
    ),
    "pipeline": ("pipeline", "See [pipelines](../guides/pipelines.md) and [schedules](../guides/schedules.md)."),
    "checkpoint": ("checkpoint", "See [checkpoints](../guides/checkpoints.md)."),
    "watchdog": ("watchdog", "See [finding hangs](../guides/hangs.md)."),
    "diagnostics": ("diagnostics", "See [measuring time and memory](../guides/measuring.md)."),
    "reproducible": ("reproducible", "See [the same bits on any number of ranks](../guides/reproducible.md)."),
    "auto": ("auto", "Settings that are chosen for you."),
    "survive": ("survive", "Training that goes on when processes die."),
}
TYPES = {"pipeline.schedule": "str", "pipeline.partition": "str"}
PREFACE = """\
# Settings

<!-- Written by `make reference`: change scripts/make_reference.py, not this page. -->

These are the keywords of `ZeroStrategy` and `PipelineStrategy`, the keys of `zero_config` under
Accelerate and transformers, and the keys of a YAML file. `print(strategy.explain())` shows every
value in effect and where it was set. An unknown key or a wrong value is an error that names the
nearest valid one.

```python
from zero_strategy import ZeroStrategy

strategy = ZeroStrategy(stage=2, checkpoint={"keep_last": 0, "layout": "pieces"}, watchdog="strict")
print(strategy.explain())
```

```yaml
stage: 3
offload: {optimizer: cpu, parameters: cpu}
activation_checkpointing: selective
checkpoint:
  bytes_per_second: 200000000
```

The framework owns gradient accumulation, clipping, mixed precision, batch size and learning rate.
They are set there and are not settings here. Options of DistributedDataParallel, such as
`find_unused_parameters`, are not needed: leave them out.

Some settings have a short form:

| short form | the same as |
| --- | --- |
| `activation_checkpointing: full` | `activation_checkpointing: {mode: full}`; `true` is `full` |
| `watchdog: strict` | `watchdog: {mode: strict}` |
| `stage: auto`, `auto: true` | `auto: {enabled: true}` |
| `survive: true` | `survive: {enabled: true}` |
| `offload: cpu` | `offload: {optimizer: cpu}`, and at stage 3 `parameters: cpu` as well; likewise `nvme` |
| `nvme_path: /local_nvme` | `nvme_path: [/local_nvme]`; the same for every list of strings |

## Hydra

`register_hydra()` before `hydra.main` adds the group `zero` with `zero0` to `zero3` to Hydra's
ConfigStore. Write `defaults: [zero: zero3]` in the file, `python train.py zero=zero2
zero.prefetch=2` on the command line, and `ZeroStrategy(config.zero)` in the script.

```python
from zero_strategy.config import register_hydra

register_hydra()
```

## Two Lightning packages

`zero_strategy.ZeroStrategy` and `PipelineStrategy` are for the Lightning that your code uses,
`lightning.pytorch` or `pytorch_lightning`. A script that uses both gets those of
`lightning.pytorch`. The others are `zero_strategy.integrations.pytorch_lightning.ZeroStrategy` and
`PipelineStrategy`.
"""


class Key(NamedTuple):
    section: str
    name: str
    kind: str
    default: str

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name


def plain(text: str) -> str:
    """A cell of a table."""
    return text.replace("|", "\\|")


def kind_of(hint: Any, field: Field[Any]) -> str:
    """The type of a setting, or the values that it accepts where these are a few words."""
    optional = get_origin(hint) in (Union, types.UnionType) and types.NoneType in get_args(hint)
    inner = next(part for part in get_args(hint) if part is not types.NoneType) if optional else hint
    accepts = field.metadata.get("accepts")
    words = re.findall(r"'([^']*)'", accepts.text) if accepts else []
    if get_origin(inner) is list:
        named = "list of str" if not words else "list of " + ", ".join(f"`{word}`" for word in words)
    elif words and len(accepts.text) < 60:
        named = ", ".join(f"`{word}`" for word in words)
    else:
        named = inner.__name__
    return f"{named} or none" if optional else named


def default_of(field: Field[Any]) -> str:
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if value in ("", []):
        return "empty"
    shown = ", ".join(value) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{shown}`"


def keys() -> list[Key]:
    """Every setting, in the order of the dataclasses."""
    from zero_strategy.config import ZeroConfig

    found = []

    def walk(owner: type, section: str) -> None:
        hints = get_type_hints(owner)
        for field in fields(owner):
            hint = hints[field.name]
            if is_dataclass(hint):
                walk(hint, field.name)  # type: ignore[arg-type]
            else:
                path = f"{section}.{field.name}" if section else field.name
                found.append(Key(section, field.name, TYPES.get(path) or kind_of(hint, field), default_of(field)))

    walk(ZeroConfig, "")
    return found


def check_example(key: Key, example: str) -> None:
    """Raise unless the example is a value that the setting accepts."""
    from zero_strategy.config import ZeroConfig
    from zero_strategy.config.section import ACCEPTS, check_value

    owner, hints = ZeroConfig, get_type_hints(ZeroConfig)
    if key.section:
        owner = hints[key.section]
    field = next(field for field in fields(owner) if field.name == key.name)
    check_value(key.path, yaml.safe_load(example), get_type_hints(owner)[key.name], field.metadata.get(ACCEPTS))


def settings_page() -> str:
    found = keys()
    known, described = [key.path for key in found], set(MEANINGS)
    if missing := set(known) ^ described:
        raise SystemExit(
            f"MEANINGS of scripts/make_reference.py and ZeroConfig differ in: {', '.join(sorted(missing))}"
        )
    lines = [PREFACE]
    for section, (title, text) in SECTIONS.items():
        lines += [
            f"## {title}\n",
            f"{text}\n",
            "| key | type | default | meaning | example |",
            "| --- | --- | --- | --- | --- |",
        ]
        for key in found:
            if key.section != section:
                continue
            meaning, example = MEANINGS[key.path]
            check_example(key, example)
            row = f"| `{key.path}` | {key.kind} | {key.default} | {plain(meaning)} | `{plain(example)}` |"
            if len(row) > ROW:
                raise SystemExit(f"the row of {key.path} has {len(row)} characters, at most {ROW}: shorten its meaning")
            lines.append(row)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def help_of(*words: str) -> str:
    """The text of `zero-strategy WORDS --help`."""
    from zero_strategy.cli import main

    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = HELP_WIDTH
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return out.getvalue()


def commands(*words: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command with its help, a group before its members."""
    text = help_of(*words)
    yield words, text
    listed = re.search(r"^positional arguments:\n  (?:command|action)\n((?:    .*\n)+)", text, re.MULTILINE)
    if listed:
        for name in re.findall(r"^    ([\w-]+)", listed[1], re.MULTILINE):
            yield from commands(*words, name)


def commands_page() -> str:
    lines = [
        "# Command line\n",
        "<!-- Written by `make reference` from the commands' own help: change the parsers, not this page. -->\n",
        "`zero-strategy COMMAND --help` prints these texts; `python -m zero_strategy.cli` is the same.\n",
    ]
    for words, text in commands():
        lines += [f"## {' '.join(('zero-strategy', *words))}\n", "```text", text.rstrip(), "```\n"]
    return "\n".join(lines).rstrip() + "\n"


def pages() -> dict[str, str]:
    """The pages by their paths in the repository."""
    return {SETTINGS: settings_page(), COMMANDS: commands_page()}


def main() -> int:
    """Write the pages, or compare them; 1 if one that is compared differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; say which pages are not up to date")
    check = parser.parse_args().check
    stale = [path for path, text in pages().items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text]
    for path in stale:
        if not check:
            (ROOT / path).write_text(pages()[path])
        print(f"{path}: {'not up to date, run `make reference`' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
