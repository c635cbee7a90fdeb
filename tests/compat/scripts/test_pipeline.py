"""A pipeline script written for DeepSpeed trains what plain torch trains, on 2 x 1, 2 x 2 and 4 x 1 ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.compat.scripts import old_pipeline as script
from tests.convert.interop import parallel_files
from tests.launcher import Launcher
from zero_strategy.compat.deepspeed.scripts.pipeline import ScriptPipelineEngine
from zero_strategy.convert.megatron import MergeRules
from zero_strategy.pipeline.transport import DataEndedError, PipelineError

CLIP, STEPS = 0.4, 3
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}, "gradient_clipping": CLIP}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 100, "hysteresis": 1}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 9}}}


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def zero(stage: int, ours: bool = False) -> dict[str, Any]:
    return {**ADAM, "stage": stage, "pipeline": {"stages": 2, "schedule": "1f1b"}} if ours else {
        **ADAM, "zero_optimization": {"stage": stage}, "pipeline": {"stages": "auto", "partition": "best"},
    }  # fmt: skip


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1, foreach=False)


@functools.cache
def expected() -> tuple[list[float], dict[str, Tensor]]:
    batches = [list(script.micro_batches(n * script.BATCH, (n + 1) * script.BATCH)) for n in range(STEPS)]
    return script.plain(batches, adamw, CLIP, script.net(deepspeed.pipe, 1, rank=0))


def check(found: dict[str, Any]) -> None:
    losses, weights = expected()
    assert found["losses"] == pytest.approx(losses, abs=1e-6)
    assert found["weights"].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=2e-6, msg=name)


# ---- training ----


def run(stages: int, config: dict[str, Any]) -> dict[str, Any]:
    found = script.main(deepspeed, stages, config, STEPS)
    engine: ScriptPipelineEngine = found.pop("engine")
    samples, copies = script.BATCH * script.MICRO, dist.get_world_size() // stages
    assert isinstance(engine, deepspeed.runtime.pipe.engine.PipelineEngine)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (samples, script.MICRO)
    assert engine.micro_batches == engine.gradient_accumulation_steps() == script.BATCH // copies
    assert (engine.global_steps, engine.global_samples) == (STEPS, STEPS * samples)
    assert engine.micro_steps == STEPS * engine.micro_batches and engine.skipped_steps == 0
    assert (engine.world_size, engine.global_rank) == (dist.get_world_size(), dist.get_rank())
    assert (engine.num_stages, engine.dp_world_size, engine.is_data_parallel) == (stages, copies, copies > 1)
    assert engine.stage_id == dist.get_rank() // copies
    assert (engine.is_first_stage(), engine.is_last_stage()) == (engine.stage_id == 0, engine.stage_id == stages - 1)
    assert (engine.total_loss is not None) == engine.is_last_stage()
    assert engine.get_global_grad_norm() > CLIP and engine.was_step_applied()  # type: ignore[operator]
    return {**found, "weights": engine.state_dict(), "norm": engine.get_global_grad_norm()}


def low(stages: int, precision: dict[str, Any]) -> dict[str, Any]:
    """Four steps in a low precision; what there is to see of steps that are skipped."""
    engine = script.start(deepspeed, stages, {**zero(1), **precision, **WARMUP})
    batches = script.own(engine, script.micro_batches())
    losses, rates, before = [], [], engine.state_dict()
    for step in range(4):
        rate = engine.get_lr()[0]
        losses.append(engine.train_batch(batches).item())
        rates.append(engine.get_lr()[0])
        assert (rates[-1] == rate) == (not engine.was_step_applied() or step == engine.skipped_steps)  # 0 at first
        if engine.skipped_steps == step + 1:
            assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
            assert engine.get_global_grad_norm() == float("inf") and not engine.was_step_applied()
    return {"losses": losses, "rates": rates, "skipped": engine.skipped_steps, "scale": engine.loss_scale}


BF16 = {"bf16": {"enabled": True}}


def train_all(stages: int, configs: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"trained": [run(stages, config) for config in configs], "epochs": epochs()}
    if dist.get_world_size() == 2:
        found["low"] = [low(stages, precision) for precision in (BF16, FP16)]
        evaluate()
        refuse()
        found["went_on"] = save(folder)
        weights(folder)
        from_deepspeed(folder)
        stage_without_weights()
    else:
        found["resumed"] = [resume(there, folder) for there in (4, 2, 1)]
    return found


def test_a_deepspeed_script_on_two_ranks_and_four(ranks: Launcher, tmp_path: Path, alone: None) -> None:
    configs = [zero(0), zero(1), zero(2, ours=True), zero(3)]
    write_deepspeed(tmp_path / "theirs" / "tag")
    by_rank = ranks(2, timeout=120)(train_all, 2, configs, str(tmp_path))
    more = ranks(4, timeout=120)(train_all, 2, [zero(1), zero(3, ours=True)], str(tmp_path))
    for copies, found in [*((1, found) for found in by_rank), *((2, found) for found in more)]:
        for trained in found["trained"]:
            check(trained)
        assert found["epochs"] == pytest.approx(epochs_plainly(copies), abs=1e-6)
    for found in more:
        for resumed in found["resumed"]:
            assert resumed == pytest.approx(by_rank[0]["went_on"], abs=1e-6)
    for precision, *ranks_found in zip((BF16, FP16), *(found["low"] for found in by_rank)):
        alike = low(1, precision)
        for seen in ranks_found:
            assert seen["losses"] == pytest.approx(alike["losses"], abs=2e-3 if precision is BF16 else 1e-4)
            assert {key: seen[key] for key in ("rates", "skipped", "scale")} == {
                key: alike[key] for key in ("rates", "skipped", "scale")
            }
        assert 0 < alike["skipped"] < 4 if precision is FP16 else alike["skipped"] == 0, alike


# ---- data ----


def epochs() -> list[float]:
    """Training data of `initialize`: seven micro-batches an epoch, four a batch (each of two copies: four, two)."""
    engine = script.start(deepspeed, 2, zero(1), training_data=script.data())
    losses = [engine.train_batch().item() for _ in range(STEPS)]
    assert isinstance(engine.training_dataloader, deepspeed.utils.RepeatingLoader)
    return losses


def epochs_plainly(copies: int) -> list[float]:
    dataset, size, endless = script.data(), script.MICRO, []
    for copy in range(copies):
        samples = list(range(copy, script.SAMPLES, copies))
        epoch = [dataset[samples[first : first + size]] for first in range(0, len(samples), size)]
        endless.append(itertools.cycle(epoch))
    batches = [[next(each) for each in endless for _ in range(script.BATCH // copies)] for _ in range(STEPS)]
    return script.plain(batches, adamw, CLIP, script.net(deepspeed.pipe, 1, rank=0))[0]


def stage_without_weights() -> None:
    """The last stage has the tied weight that the first one owns, or a function alone."""
    config = {**zero(1), "train_micro_batch_size_per_gpu": script.MICRO, "gradient_accumulation_steps": script.BATCH}
    tied = script.net(deepspeed.pipe, 2, partition_method=[0, 6, 7])
    engine, *_ = deepspeed.initialize(model=tied, config=config)
    batches = script.micro_batches()
    assert [engine.train_batch(batches).item() for _ in range(STEPS)] == pytest.approx(expected()[0], abs=1e-6)
    layers = [nn.Linear(1, 1), nn.Linear(1, 1), torch.tanh]
    mse = nn.functional.mse_loss
    bare = deepspeed.pipe.PipelineModule(layers, 2, loss_fn=mse, partition_method=[0, 2, 3])
    engine, *_ = deepspeed.initialize(model=bare, config=config)
    losses = [engine.train_batch(itertools.repeat([torch.ones(2, 1)] * 2)).item() for _ in range(STEPS)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


# ---- evaluation, refusals ----


def evaluate() -> None:
    """With other numbers of micro-batches than in training, in all the ways there are; training goes on as before."""
    engine = script.start(deepspeed, 2, zero(1))
    batches = script.micro_batches()
    losses = [engine.train_batch(batches).item()]
    held = list(script.micro_batches(52, 58))
    model = script.net(deepspeed.pipe, 1, rank=0)
    model.load_state_dict(engine.state_dict())
    with torch.no_grad():
        outputs = [model(inputs) for inputs, _ in held]
        each = [script.loss_fn(output, labels).item() for output, (_, labels) in zip(outputs, held)]
    last = engine.is_last_stage()

    def close(found: Any, expected: Any) -> None:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)

    assert engine.eval_batch(iter(held)).item() == pytest.approx(sum(each[:4]) / 4, abs=1e-6)
    assert not engine.module.training and engine.zero.executor.keep_outputs
    for count in (1, 3, 6):
        loss, logits = engine.eval_batch(iter(held), return_logits=True, num_micro_batches=count)
        assert loss.item() == pytest.approx(sum(each[:count]) / count, abs=1e-6)
        close(logits, (outputs[0] if count == 1 else outputs[:count]) if last else None)
    assert (engine.eval_batch(iter(held), bcast_loss=False) is None) == (not last)
    listed = engine.eval_batch(iter(held), reduce_output=None, num_micro_batches=6)
    assert [loss.item() for loss in listed] == pytest.approx(each, abs=1e-6)
    unlabelled = [(inputs,) for inputs, _ in held[:3]]
    close(
        engine.eval_batch(iter(unlabelled), compute_loss=False, reduce_output=None, num_micro_batches=3),
        outputs[:3] if last else None,
    )
    found = engine.eval_batch(iter(unlabelled), compute_loss=False, num_micro_batches=3)
    close(found, torch.stack(outputs[:3]).mean(0) if last else None)
    with pytest.raises(ValueError, match="no labels, so there is no loss"):
        engine.eval_batch(iter(unlabelled), num_micro_batches=3)
    with pytest.raises(ValueError, match=r"reduce_output 'sum' is not done; accepted: 'avg', None"):
        engine.eval_batch(iter(held), reduce_output="sum")
    with pytest.raises(ValueError, match="num_micro_batches is 0"):
        engine.eval_batch(iter(held), num_micro_batches=0)
    losses += [engine.train_batch().item() for _ in range(2)]  # of the iterator of the first call
    assert losses == pytest.approx(expected()[0], abs=1e-6) and engine.module.training


def refuse() -> None:
    """Limits of a pipeline; data that ends early leaves everything as it was."""
    engine = script.start(deepspeed, 2, zero(2))
    stepped: list[bool] = []
    engine.optimizer.register_step_pre_hook(lambda *_: stepped.append(engine.is_gradient_accumulation_boundary()))
    for call in (engine.forward, engine, engine.backward, engine.step, lambda _: engine.no_sync()):
        with pytest.raises(PipelineError, match=r"micro-batches overlap.*train_batch\(\)"):
            call(torch.zeros(1))
    with pytest.raises(StopIteration, match="ended before micro-batch 3; a batch needs 4") as caught:
        engine.train_batch(itertools.islice(script.micro_batches(70), 3))
    assert isinstance(caught.value, DataEndedError)
    with pytest.raises(TypeError, match=r"train_batch|set_dataiterator.*not list: pass iter\(loader\)"):
        engine.train_batch([1, 2])
    with pytest.raises(TypeError, match=r"eval_batch\(\) takes an iterator"):
        engine.eval_batch([1, 2])
    with pytest.raises(RuntimeError, match=r"no_grad\(\) could not train"), torch.no_grad():
        engine.train_batch(iter([]))
    engine.set_dataiterator(None)
    with pytest.raises((ValueError, PipelineError), match=r"has no data here.*training_data"):
        engine.train_batch()
    assert engine.global_steps == engine.micro_steps == 0 and not engine.is_gradient_accumulation_boundary()
    assert engine.module_state_dict() is None
    with pytest.raises(ValueError, match=r"load_module_state_dict\(None\).* there is none yet"):
        engine.load_module_state_dict(None)

    engine.set_batch_fn(lambda batch: (batch["tokens"][:, :-1], batch["tokens"][:, 1:]))
    whole = (torch.cat([inputs, labels[:, -1:]], 1) for inputs, labels in script.micro_batches())
    losses = [engine.train_batch({"tokens": tokens} for tokens in whole).item() for _ in range(1)]
    assert losses == pytest.approx(expected()[0][:1], abs=1e-6) and stepped == [True]


# ---- checkpoints ----


def save(folder: str) -> list[float]:
    """On two ranks, which go on."""
    engine = script.main(deepspeed, 2, {**zero(1), **WARMUP}, STEPS)["engine"]
    assert engine.save_checkpoint(folder, client_state={"step": STEPS})
    batches = script.own(engine, script.micro_batches(STEPS * script.BATCH))
    return [engine.train_batch(batches).item() for _ in range(2)]


def resume(stages: int, folder: str) -> list[float]:
    """On four ranks, of what two wrote."""
    engine = script.start(deepspeed, stages, {**zero(3 if stages < 4 else 1), **WARMUP})
    path, client_state = engine.load_checkpoint(folder)
    assert path == str(Path(folder) / "global_step3") and client_state == {"step": STEPS}
    assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * engine.micro_batches)
    batches = script.own(engine, script.micro_batches(STEPS * script.BATCH))
    return [engine.train_batch(batches).item() for _ in range(2)]


def weights(folder: str) -> None:
    """Full weights from a checkpoint, a dict, and the last checkpoint again; in layer files for other modules."""
    engine = script.start(deepspeed, 2, zero(3))
    fresh = engine.state_dict()
    saved = Path(folder) / "global_step3"
    engine.load_module_state_dict(str(saved))
    trained = engine.state_dict()
    assert not any(torch.equal(trained[name], fresh[name]) for name in fresh)
    engine.module.save_state_dict(Path(folder) / "layers")
    engine.load_state_dict(fresh)
    same(engine, fresh)
    dist.barrier()
    with pytest.raises(ValueError, match=r"layers has the layer files .* before initialize"):
        engine.load_module_state_dict(str(Path(folder) / "layers"))
    alone = script.net(deepspeed.pipe, 1, rank=0)
    alone.load_state_dir(Path(folder) / "layers")
    assert all(torch.equal(value, trained[name]) for name, value in alone.state_dict().items())
    engine.load_checkpoint(folder, load_optimizer_states=False)
    engine.load_module_state_dict(fresh)
    engine.load_module_state_dict(None)
    same(engine, trained)
    with pytest.raises(ValueError, match=r"tied_modules\.embed\.weight"):
        engine.load_module_state_dict({name: value for name, value in fresh.items() if "embed" not in name})


def write_deepspeed(path: Path) -> None:
    """Files of DeepSpeed's two stages of this model."""
    shapes = {name: tuple(value.shape) for name, value in script.net(deepspeed.pipe, 1, rank=0).state_dict().items()}
    parts = parallel_files.shards_of(shapes, MergeRules(), 0, 1)
    path.mkdir(parents=True)
    for layer in range(6):
        start = f"{layer}." if layer else "tied_modules.embed."
        state = {name.removeprefix(start): parts[name] for name in shapes if name.startswith(start)}
        torch.save(state, path / f"layer_{layer:02d}-model_states.pt")
    for stage, layers in enumerate(("12", "345")):
        names = [name for name in shapes if name[0] in (*layers, "t")]
        parallel_files.save_rank(path, stage, dict.fromkeys(names, "a"), parts, (2, 1, 1))


def from_deepspeed(folder: str) -> None:
    whole = parallel_files.value
    engine = script.start(deepspeed, 2, zero(3))
    path, _ = engine.load_checkpoint(Path(folder) / "theirs", "tag")
    assert path is not None and engine.global_steps == 5
    for name, found in engine.state_dict().items():
        assert torch.equal(found, whole("w", name, found.shape)), name
    for name, state in engine.zero.full_optimizer_state(engine.optimizer).items():
        for kind in parallel_files.KINDS:
            assert torch.equal(state[kind], whole(kind, name, state[kind].shape)), (kind, name)


def same(engine: Any, expected: dict[str, Tensor]) -> None:
    found = engine.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
