"""`zero-strategy config explain | convert`: tables, JSON, exit statuses, files that load_config reads."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from zero_strategy.cli import main
from zero_strategy.config import load_config

DATA = Path(__file__).parent / "data"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit status, output, messages."""
    status = main(["config", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out, said.err


def row(text: str, key: str) -> list[str]:
    """The cells of the first row that begins with a key."""
    (cells, *_) = [line.split(None, 2) for line in text.splitlines() if line.split(None, 1)[:1] == [key]]
    return cells


def saved(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(json.dumps(values))
    return path


def test_explain_shows_settings_what_is_owned_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "hf_zero3.json"
    status, text, _ = run(capsys, "explain", path, "--world", 8)
    assert status == 0
    assert row(text, "stage") == ["stage", "3", f"user: {path}: zero_optimization.stage"]
    assert row(text, "mesh.shard") == ["mesh.shard", "8", "derived: world size 8 / replicate 1"]
    assert row(text, "world_size") == ["world_size", "8", "--world"]
    assert row(text, "train_batch_size") == ["train_batch_size", "auto", f"user: {path}: train_batch_size"]
    keys = text.split("keys of the file:")[1]
    assert row(keys, "zero_optimization.overlap_comm")[2].startswith("accepted without effect  reductions always run")
    assert row(keys, "fp16.loss_scale_window")[2].split() == ["translated", "loss_scale.growth_interval"]


def test_explain_derives_the_batch_and_names_the_defaults(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = {"train_batch_size": 64, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    path = saved(tmp_path / "ds.json", values)
    status, text, _ = run(capsys, "explain", path, "--world", 8)
    assert status == 0
    assert row(text, "train_micro_batch_size_per_gpu")[1:] == ["4", "derived: world size 8"]
    assert row(text, "gradient_clipping")[1:] == ["1.0", "default of DeepSpeed 0.19.8: gradient_clipping"]
    assert row(text, "stage")[1:] == ["0", "default of DeepSpeed 0.19.8: zero_optimization.stage"]
    assert row(text, "computation")[1:] == ["bf16", f"user: {path}: bf16.enabled"]
    status, text, errors = run(capsys, "explain", path, "--world", 3)
    assert status == 2 and "train_batch_size 64 / (gradient_accumulation_steps 2 x 3 ranks) = 10.6667" in errors


def test_explain_divides_a_batch_among_copies_of_a_pipeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = {"train_batch_size": 64, "gradient_accumulation_steps": 4, "pipeline": {"stages": 2, "partition": "best"}}
    path = saved(tmp_path / "ds.json", values)
    status, text, _ = run(capsys, "explain", path, "--world", 8)
    assert status == 0
    assert row(text, "pipeline.stages")[1:] == ["2", f"user: {path}: pipeline.stages"]
    assert row(text, "train_micro_batch_size_per_gpu")[1:] == ["4", "derived: world size 8 / 2 pipeline stages"]
    assert row(text, "mesh.shard")[1:] == ["4", "derived: world size 8 / pipeline.stages 2 / replicate 1"]


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(capsys, "explain", DATA / "hf_zero3_offload.json", "--json")
    found = json.loads(text)
    assert status == 0
    assert found["settings"]["stage"]["value"] == 3 and found["settings"]["offload.optimizer"]["value"] == "cpu"
    assert not [key for key in found["keys"] if key["classification"] == "rejected"]


def test_explain_reads_our_files_and_base64(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "zero.yaml").write_text("stage: 1\n")
    status, text, _ = run(capsys, "explain", tmp_path / "zero.yaml")
    assert status == 0 and row(text, "stage") == ["stage", "1", f"user: {tmp_path / 'zero.yaml'}"]
    assert "keys of the file" not in text
    encoded = base64.b64encode(b'{"zero_optimization": {"stage": 2}}').decode()
    status, text, _ = run(capsys, "explain", encoded)
    assert status == 0 and row(text, "stage") == ["stage", "2", "user: base64: zero_optimization.stage"]


@pytest.mark.parametrize("action", ["explain", "convert"])
def test_config_command_what_cannot_be_read(action: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, errors = run(capsys, action, tmp_path / "nowhere.json")
    assert status == 2 and "nowhere.json" in errors
    path = saved(tmp_path / "ds.json", {"zero_optimization": {"stagee": 2}})
    status, _, errors = run(capsys, action, path)
    assert status == 2 and "did you mean 'zero_optimization.stage'?" in errors


@pytest.mark.parametrize("name", ["hf_zero2", "hf_zero3"])
@pytest.mark.filterwarnings("ignore:keys without effect")
def test_convert_writes_what_load_config_reads(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, text, errors = run(capsys, "convert", DATA / f"{name}.json")
    assert status == 0 and "why nothing is lost" in errors
    (tmp_path / "zero.yaml").write_text(text)
    config = load_config(tmp_path / "zero.yaml")
    assert config == load_config(DATA / f"{name}.json") and config.deepspeed is None
    assert "# optimizer: AdamW" in text and "configure_optimizers" in text
    status, printed, _ = run(capsys, "convert", DATA / f"{name}.json", "-o", tmp_path / "again.yaml")
    assert (status, printed) == (0, "") and (tmp_path / "again.yaml").read_text() == text
    status, _, errors = run(capsys, "convert", DATA / f"{name}.json", "-o", tmp_path / "again.yaml")
    assert status == 2 and "exists already" in errors


def test_convert_notes_what_others_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = {"gradient_clipping": 0.5, "fp16": {"enabled": True, "loss_scale": 64}, "dataloader_drop_last": True}
    path = saved(tmp_path / "ds.json", values)
    status, text, _ = run(capsys, "convert", path)
    assert status == 0
    for part in ("# gradient_clipping: 0.5", "Trainer(gradient_clip_val=...)", "# precision: fp16", "drop_last=True"):
        assert part in text
    (tmp_path / "zero.yaml").write_text(text)
    assert load_config(tmp_path / "zero.yaml") == load_config(path)


def test_convert_refuses_rejected_keys_and_our_own_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = saved(tmp_path / "ds.json", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}})
    status, text, errors = run(capsys, "convert", path)
    assert status == 2 and not text and "zero_optimization.zero_hpz_partition_size: 8" in errors
    (tmp_path / "zero.yaml").write_text("stage: 1\n")
    status, _, errors = run(capsys, "convert", tmp_path / "zero.yaml")
    assert status == 2 and "no DeepSpeed JSON" in errors
