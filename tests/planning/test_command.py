"""`zero-strategy plan` in one process: models of every kind, output of every kind, errors that name the way out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planning.models import Stack, gpt
from zero_strategy.cli import main
from zero_strategy.cli.plan_model import shape_of_numbers
from zero_strategy.config import load_config
from zero_strategy.planning.gpt_shape import gpt_shape
from zero_strategy.planning.model_shape import ModelShape

MODELS = "tests.planning.models"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["plan", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status, out, _ = run(capsys, *arguments, "--json")
    return status, json.loads(out)


def test_a_factory_and_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--args", '{"width": 256, "depth": 5}', "--world", "4", "--stage", "2", "--dtype", "bf16")
    options += ("--device", "cpu", "--no-snapshots", "--host-mem", "1GB")
    status, found = as_json(capsys, f"{MODELS}:Stack", *options)
    assert status == 0 and found["fits"] and found["changes"] == []
    assert found["parameters"] == 5 * (256 * 256 + 256) and found["units"] == 6
    with torch.device("meta"):
        model = Stack(256, 5)
    plan = load_config(stage=2).plan(
        model, world_size=4, compute_dtype=torch.bfloat16, device="cpu", snapshots=False, ranks_per_host=4
    )
    assert found["ledger"] == json.loads(json.dumps(plan.ledger().to_json()))


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--params", "1e9", "--world", "2", "--gpu-mem", "6GB", "--host-mem", "256GB")
    assert status == 1
    assert "It does not fit.\nIt fits with" in out and "too large" in out and "offload.optimizer: cpu" in out
    assert "activations come on top" in out and "gradient buckets  inside a step" in out
    options = ("--micro-batch", "4", "--sequence", "1024", "--host-mem", "64GB")
    status, out, _ = run(capsys, "--params", "1e9", "--gpu-mem", "40GB", *options)
    assert status == 0 and "activations       inside a step" in out and "come on top" not in out
    options = ("--by-unit", "--rank", "0", "--activations", "1MB")
    status, out, _ = run(capsys, f"{MODELS}:Stack", "--device", "cpu", *options)
    assert status == 0 and "layers.2" in out and "(root)" not in out and "activations come on top" not in out


@pytest.mark.parametrize("model", ["ready", "LooksAtValues"])
def test_modules_that_are_there_and_those_that_look_at_values(capsys: pytest.CaptureFixture[str], model: str) -> None:
    status, found = as_json(capsys, f"{MODELS}:{model}", "--device", "cpu")
    assert status == 0 and found["parameters"] in (3 * (128 * 128 + 128), 2 * (100 * 100 + 100) + 101 * 100 + 100)


def test_a_hugging_face_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=100,
        tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    real = transformers.LlamaForCausalLM(config)
    for path in (tmp_path, tmp_path / "config.json"):
        _, found = as_json(capsys, str(path), "--device", "cpu", "--world", "2")
        assert found["parameters"] == sum(p.numel() for p in real.parameters())
        assert found["model"].startswith("LlamaForCausalLM") and found["units"] == 4


def test_plain_numbers_are_a_gpt() -> None:
    with torch.device("meta"):
        module = gpt(64, 3, 100)
    shape, real = gpt_shape(64, 3, 100), ModelShape.of(module)
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    assert [(unit.name, dict(unit.parameters)) for unit in shape.units] == [
        (unit.name, dict(unit.parameters)) for unit in real.units
    ]


@pytest.mark.parametrize("numbers", [(7e9, 32, 4096, None), (7e9, 32, 4096, 32000), (1.3e9, 24, 2048, 50304)])
def test_plain_numbers_make_up_the_number(numbers: Any) -> None:
    shape = shape_of_numbers(*numbers)
    assert abs(shape.parameters / numbers[0] - 1) < 1e-4
    assert len(shape.units) == numbers[1] + 1
    assert abs(shape_of_numbers(7e9, None, None, None).parameters / 7e9 - 1) < 0.05


def test_deepspeeds_json_brings_stage_precision_and_offload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    file.write_text(json.dumps({"train_batch_size": 4, "bf16": {"enabled": True}, "zero_optimization": zero}))
    _, found = as_json(capsys, f"{MODELS}:Stack", "--config", str(file), "--world", "2")
    settings = found["settings"]
    assert (settings["stage"], settings["compute_dtype"], settings["offload"]) == (2, "bfloat16", "optimizer cpu")
    _, found = as_json(capsys, f"{MODELS}:Stack", "--config", str(file), "--stage", "3", "--offload-optimizer", "none")
    assert (found["settings"]["stage"], found["settings"]["offload"]) == (3, "none")


def test_plan_command_accumulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Stage 1 keeps full gradients where they wait for later micro-batches."""
    file = tmp_path / "ds.json"
    batch = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 8}  # so in 4 parts on 2 ranks
    file.write_text(json.dumps(batch | {"zero_optimization": {"stage": 1}}))
    held = []
    for options in (("--config", str(file)), ("--stage", "1", "--accumulation", "2"), ("--stage", "1")):
        _, found = as_json(capsys, f"{MODELS}:Stack", *options, "--world", "2", "--device", "cpu")
        gradients = [e["taken"] for e in found["ledger"]["entries"] if e["category"] == "gradients"]
        held.append((found["settings"]["accumulation"], sum(gradients)))
    assert [count for count, _ in held] == [4, 2, 1]
    assert held[0][1] == held[1][1] == 2 * held[2][1]
    status, _, error = run(capsys, f"{MODELS}:Stack", "--accumulation", "0")
    assert status == 2 and "accumulation is 0; accepted: 1 or more" in error
    status, _, error = run(capsys, f"{MODELS}:Stack", "--config", str(file), "--world", "16")
    assert status == 2 and "train_batch_size" in error


def test_micro_batches_of_a_pipeline_wait(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "zero.yaml"
    file.write_text("{stage: 1, pipeline: {stages: 2, micro_batches: 8}}")
    _, found = as_json(capsys, f"{MODELS}:Stack", "--config", str(file), "--world", "4", "--device", "cpu")
    assert found["settings"]["accumulation"] == 8


def test_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "plan.png"
    options = ("--gpu-mem", "16GB", "--host-mem", "64GB", "--offload-optimizer", "nvme", "--disk", "1TB")
    status, _, err = run(capsys, "--params", "1e8", "--png", str(target), *options)
    assert status == 0, err
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and target.stat().st_size > 10_000
    status, _, err = run(capsys, "--params", "1e8", "--png", str(tmp_path / "plan.pdf"))
    assert status == 2 and "must end in .png" in err


def test_the_largest_models(capsys: pytest.CaptureFixture[str]) -> None:
    budget = ("--gpu-mem", "2GB", "--host-mem", "8GB", "--vocabulary", "1000")
    status, out, _ = run(capsys, "--largest", "--dtype", "bf16", *budget)
    head, _, table = out.partition("\n\n")
    assert status == 0 and "on 1 rank(s), 1 per host" in head and "5% stays free" in head
    assert len(table.splitlines()) == 1 + 4 * 2 + 1 and "optimizer nvme" not in table
    status, found = as_json(capsys, "--largest", "--dtype", "bf16", *budget, "--disk", "1TB")
    assert {(entry["stage"], entry["offload"]["optimizer"]) for entry in found} >= {(0, "none"), (3, "nvme")}
    assert all(entry["parameters"] > 1e6 for entry in found)
    status, out, _ = run(capsys, "--largest", "--gpu-mem", "1KB", "--host-mem", "1KB")
    assert status == 1 and "none fits" in out


def test_the_longest_sequences_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--largest", "--layers", "4", "--hidden", "256", "--vocabulary", "32000", "--world", "4")
    budget = ("--gpu-mem", "8GB", "--host-mem", "8GB", "--dtype", "bf16")
    status, found = as_json(capsys, *arguments, *budget)
    tokens = {(e["activation_checkpointing"], e["tile_tokens"], e["sequence_ranks"]): e["tokens"] for e in found}
    assert status == 0 and len(tokens) == 3 * 2 * 2
    for mode in ("none", "full"):
        for tile in (0, 2048):
            one, two, four = (tokens[mode, tile, ranks] for ranks in (1, 2, 4))
            assert one > 1000 and 1.3 * one < two < 2.02 * one  # messages of attention take some
            assert four == pytest.approx(2 * two, rel=0.01)
    assert tokens["full", 2048, 1] > 4 * tokens["none", 0, 1]
    peaks = [tier["taken"] for e in found for name, tier in e["ledger"]["tiers"].items() if name == "device"]
    assert all(0.98 * 0.95 * 8e9 < peak <= 0.95 * 8e9 for peak in peaks) and len(peaks) == 12
    status, table, _ = run(capsys, *arguments, *budget, "--micro-batch", "2")
    assert status == 0 and "2 per micro-batch" in table and "on 4 rank(s)" in table and "mesh.sequence" in table
    status, table, _ = run(capsys, *arguments, "--gpu-mem", "1MB", "--host-mem", "8GB")
    assert status == 1 and "none fits" in table


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --params, or --layers and --hidden"),
        (("no_such_file.json",), "neither a file or directory nor 'module:factory'"),
        (("no_such_module:build",), "module 'no_such_module' cannot be imported"),
        ((f"{MODELS}:missing",), "has no 'missing'"),
        ((f"{MODELS}:number",), "is a int; name a function, or a class"),
        ((f"{MODELS}:returns_nothing",), "returned a NoneType, not a torch module"),
        ((f"{MODELS}:gpt",), "--args"),
        ((f"{MODELS}:Stack", "--args", "[1]"), "give a JSON object"),
        ((f"{MODELS}:Stack", "--args", "{"), "is no JSON"),
        ((f"{MODELS}:Stack", "--params", "7e9"), "one is given already"),
        (("--params", "7e9", "--layers", "32"), "both of --layers and --hidden"),
        (("--params", "1e9", "--layers", "32", "--hidden", "4096"), r"more than --params 1e\+09; give --vocabulary"),
        (("--params", "0.5"), "--params is 0.5"),
        (("--params", "1e8", "--optimizer", "Sophia"), "'Sophia' is not known.*--optimizer-bytes"),
        (("--params", "1e8", "--optimizer", "SGD", "--optimizer-bytes", "4"), "give one of them"),
        (("--params", "1e8", "--world", "4", "--replicate", "3"), "mesh.replicate is 3"),
        (("--params", "1e8", "--world", "4", "--rank", "4"), "rank 4 is not one of 4 ranks"),
        (
            ("--params", "1e8", "--stage", "2", "--offload-optimizer", "cpu", "--offload-parameters", "cpu"),
            "needs stage 3",
        ),
        (("--params", "1e8", "--margin", "1"), "--margin is 1.0"),
        (("--params", "1e8", "--micro-batch", "0"), "--micro-batch is 0"),
        ((f"{MODELS}:Stack", "--micro-batch", "1"), "factories that return .* --activations 4GB"),
        (("--params", "1e8", "--ranks-per-host", "3"), "ranks_per_host is 3"),
        (("--largest", f"{MODELS}:Stack"), "leave out the model"),
        (("--params", "1e8", "--config", "no_such.yaml"), "no_such.yaml"),
    ],
)
def test_mistakes_are_named_with_the_way_out(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == "" and re.search(said, err), err


SCRIPT = """
import torch
from torch import nn

def build(width=64):
    return nn.Linear(width, width)

def factory():
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    return nn.Linear(8, 8), lambda m: torch.optim.SGD(m.parameters(), 0.1), list(x), lambda m, b: m(b).sum()

def mapping():
    model, optimizer, batches, loss = factory()
    return {"model": model, "optimizer": optimizer, "batches": batches, "loss": loss}

def layers():
    return [nn.Linear(8, 8), nn.Linear(8, 1)], lambda m: None, [], lambda outputs, labels: None

def broken():
    raise KeyError("no column 'label'")
"""


@pytest.mark.parametrize(("name", "count"), [("build", 64 * 65), ("factory", 72), ("mapping", 72)])
def test_a_factory_in_a_file_as_verify_takes_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / f"my_{name}.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    for place in (f"my_{name}.py", f"./my_{name}.py", str(folder / f"my_{name}.py")):
        status, found = as_json(capsys, f"{place}:{name}", "--world", "4", "--device", "cpu", "--host-mem", "1GB")
        assert status == 0 and found["parameters"] == count


def test_what_goes_wrong_in_a_file_names_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "my_broken.py"
    file.write_text(SCRIPT)
    line = SCRIPT.splitlines().index("    raise KeyError(\"no column 'label'\")") + 1
    status, _, err = run(capsys, f"{file}:broken")
    assert status == 2 and f"({file}, line {line}, in broken)" in err and "no column 'label'" in err
    assert "Traceback" not in err
    status, _, err = run(capsys, f"{file}:layers")
    assert status == 2 and "returned the layers of a pipeline; a plan is of a whole model" in err
    (tmp_path / "unreadable.py").write_text("import torch\nimport no_such_package\n")
    status, _, err = run(capsys, f"{tmp_path / 'unreadable.py'}:build")
    assert status == 2 and "No module named 'no_such_package'" in err and "line 2)" in err
    for place in (f"{tmp_path}/gone.py:build", "./my_broken:build"):
        status, _, err = run(capsys, place)
        assert status == 2 and re.search("there is no file|neither a .py file nor the name of a module", err), err


def test_a_bad_hugging_face_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    unknown = '{"model_type": "nope"}'
    for text, said in (("{", "cannot be read"), ("{}", "has no 'model_type'"), (unknown, "not know it")):
        file.write_text(text)
        status, _, err = run(capsys, str(file))
        assert status == 2 and said in err


def test_help_lists_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = capsys.readouterr().out
    for needed in ("examples:", "--largest", "module:factory", "Exit status", "--activations", "--gpu-mem"):
        assert needed in out


def test_the_quicker_gather_on_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--params", "1e9", "--world", "2", "--gpu-mem", "80GB", "--host-mem", "256GB")
    for stage, dtype, link, better in ((2, "bf16", "0.1", "delta"), (1, "bf16", "10", "values")):
        _, found = as_json(capsys, *model, "--stage", str(stage), "--dtype", dtype, "--link", link)
        (said,) = found["suggestions"]
        assert said.startswith(f"communication.parameters: {better} is quicker on {link} Gbit/s: after a step values")
    for stage, dtype in ((3, "bf16"), (2, "fp32")):
        _, found = as_json(capsys, *model, "--stage", str(stage), "--dtype", dtype, "--link", "0.1")
        assert found["suggestions"] == []
    with pytest.raises(SystemExit):
        run(capsys, *model, "--link", "0")
    assert "--link: invalid" in capsys.readouterr().err
