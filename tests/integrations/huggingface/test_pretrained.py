"""`from_pretrained` without a whole model anywhere: the same values as transformers' own, bit for bit."""

from __future__ import annotations

import copy
import functools
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch import LightningModule
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import zero_strategy
from tests.integrations.accelerate.training import fresh_state, make
from tests.integrations.huggingface.adapters import adapted
from tests.integrations.huggingface.training import KINDS, build, difference, resume, rows, run, trainer_of
from tests.integrations.lightning import trainers
from tests.launcher import Launcher
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.transformers import from_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")


def saved(folder: Path, kind: str, **options: Any) -> str:
    model = build(kind)
    model.save_pretrained(folder / kind, **options)
    return str(folder / kind)


def all_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters under all their names, and buffers, those that no state dict has, too."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def compare(path: str, model_class: Any, stages: list[int], options: dict[str, Any]) -> list[str]:
    """Differences from transformers' own loading: values, dtypes, ties, mode, outputs."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(3)
    plain = model_class.from_pretrained(path, **options)
    expected, wrong = all_tensors(plain), []
    for stage in stages:
        with fresh_state():
            torch.manual_seed(3)
            model = from_pretrained(model_class, path, **options)
            accelerator: Any = make(stage)
            accelerator.prepare(model)
            values = {**all_tensors(model), **accelerator.engine(model).full_state_dict()}
            inputs = {"input_ids": torch.arange(3, 9).view(1, 6)}
            if model.config.is_encoder_decoder:
                inputs["decoder_input_ids"] = inputs["input_ids"]
            with torch.no_grad():
                outputs = [net(**inputs)[0] for net in (plain, model)]
        wrong += [f"{stage}: {name}" for name in expected.keys() ^ values.keys()]
        for name, value in expected.items():
            if values[name].dtype != value.dtype or not torch.equal(values[name], value):
                wrong.append(f"{stage}: {name}")
        ties = [len({id(p) for p in m.parameters()}) for m in (plain, model)]
        same = [type(m) for m in (plain, model)], [m.training for m in (plain, model)], ties
        wrong += [f"{stage}: {pair}" for pair in same if pair[0] != pair[1]]
        if not torch.equal(*outputs):
            wrong.append(f"{stage}: outputs")
    return wrong


CLASS = {
    "gpt2": transformers.GPT2LMHeadModel,
    "llama": AutoModelForCausalLM,
    "bert": transformers.BertForMaskedLM,
    "t5": transformers.T5ForConditionalGeneration,
}


# Every stage on two ranks; on three, which divide nothing evenly, those that read slices of the weights.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world", "stages"), [(1, [2]), (2, [1, 2, 3]), (3, [2, 3])], ids=["1", "2", "3"])
def test_the_same_bits(ranks: Launcher, tmp_path: Path, kind: str, world: int, stages: list[int]) -> None:
    path = saved(tmp_path, kind, max_shard_size="20KB" if world == 2 else "1GB")
    for wrong in ranks(world, timeout=120)(compare, path, CLASS[kind], stages, {}):
        assert not wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"])
def test_another_dtype(ranks: Launcher, tmp_path: Path, dtype: Any) -> None:
    for kind in ("llama", "t5"):  # t5 keeps some weights in float32
        path = saved(tmp_path, kind)
        for wrong in ranks(2, timeout=120)(compare, path, CLASS[kind], [3], {"dtype": dtype}):
            assert not wrong


def other_head(folder: Path) -> tuple[str, Any]:
    """A base model's weights for a class with a head: names without the prefix, a head that is nowhere."""
    build("bert").bert.save_pretrained(folder / "base")
    return str(folder / "base"), transformers.AutoModelForSequenceClassification


def no_head(folder: Path) -> tuple[str, Any]:
    """A model with a head for the base class: names with a prefix, a head that nobody wants."""
    return saved(folder, "gpt2"), transformers.AutoModel


def fused_experts(folder: Path) -> tuple[str, Any]:
    """Stored expert by expert, and stacked by transformers while it loads."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.MixtralConfig(vocab_size=48, num_key_value_heads=1, num_local_experts=3, **shape)
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(folder / "experts")
    names = load_file(folder / "experts" / "model.safetensors").keys()
    assert any("experts.1." in name for name in names)
    return str(folder / "experts"), AutoModelForCausalLM


def stored_twice(folder: Path, change: float = 0.0) -> tuple[str, Any]:
    """Weights that the config ties, under both names."""
    path = Path(saved(folder, "gpt2"))
    state = load_file(path / "model.safetensors")
    state["lm_head.weight"] = state["transformer.wte.weight"] + change
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return str(path), transformers.GPT2LMHeadModel


def stored_twice_and_different(folder: Path) -> tuple[str, Any]:
    return stored_twice(folder, 1.0)


@pytest.mark.parametrize("make_files", [other_head, no_head, fused_experts, stored_twice, stored_twice_and_different])
def test_names_that_are_not_the_model_s(ranks: Launcher, tmp_path: Path, make_files: Any) -> None:
    path, model_class = make_files(tmp_path)
    for wrong in ranks(2, timeout=120)(compare, path, model_class, [1, 3], {}):
        assert not wrong


def test_other_sizes_are_initialised_where_asked_for(ranks: Launcher, tmp_path: Path) -> None:
    path = saved(tmp_path, "llama")
    options = {"vocab_size": 50, "ignore_mismatched_sizes": True}
    for wrong in ranks(2, timeout=120)(compare, path, transformers.LlamaForCausalLM, [3], options):
        assert not wrong
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        from_pretrained(transformers.LlamaForCausalLM, path, vocab_size=50)


def test_what_is_missing_and_unexpected_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = []
    for load in (transformers.BertForTokenClassification.from_pretrained, None):
        path = saved(tmp_path, "bert")
        if load is None:
            _, info = from_pretrained(transformers.BertForTokenClassification, path, output_loading_info=True)
        else:
            _, info = load(path, output_loading_info=True)
        reports.append((info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"]))
    assert reports[0] == reports[1] and reports[0][0] == {"classifier.weight", "classifier.bias"}
    assert "cls.predictions.bias" in reports[0][1]


class Live(TorchDispatchMode):
    """The most bytes that storages on real devices had at once."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self.storages[id(storage)] = weakref.ref(storage)
        living = [storage for reference in self.storages.values() if (storage := reference()) is not None]
        self.storages = {id(storage): weakref.ref(storage) for storage in living}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in living))
        return result


def peak(path: str, stage: int) -> dict[str, int]:
    transformers.logging.set_verbosity_error()
    with fresh_state(), Live() as live:
        model = from_pretrained(AutoModelForCausalLM, path)
        made = live.peak
        accelerator: Any = make(stage)
        accelerator.prepare(model)
        units = accelerator.engine(model).model.units
        unit = max(sum(4 * bucket.layout.numel for bucket in each.buckets) for each in units)
        return {"made": made, "peak": live.peak, "unit": unit}


def test_no_rank_ever_has_the_whole(ranks: Launcher, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=48, num_key_value_heads=2, **shape)
    model = transformers.LlamaForCausalLM(config)
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    for found in ranks(2)(peak, str(tmp_path), 3):
        assert found["made"] < whole / 100 and found["unit"] < whole / 10
        assert found["peak"] < whole / 2 + 3 * found["unit"]  # its slices; a unit twice while it is made, and a bit
    for found in ranks(2)(peak, str(tmp_path), 1):
        assert found["peak"] >= whole


def plainly(path: str, kind: str) -> Any:
    return CLASS[kind].from_pretrained(path)


def deferred(path: str, kind: str) -> Any:
    return from_pretrained(CLASS[kind], path)


def with_adapter(load: Any, path: str, head: bool, kind: str) -> Any:
    return adapted(kind, load(path, kind), **({"modules_to_save": ["lm_head"]} if head else {}))


@pytest.mark.parametrize(("kind", "stage"), [("gpt2", 1), ("llama", 2), ("llama", 3), ("bert", 3), ("t5", 3)])
def test_training_goes_on_as_from_plain_loading(ranks: Launcher, tmp_path: Path, kind: str, stage: int) -> None:
    path, folder = saved(tmp_path, kind), str(tmp_path / "run")
    plain, _ = ranks(2, timeout=120)(run, None, kind, folder, make=functools.partial(plainly, path))[0]
    ours, _ = ranks(2, timeout=120)(run, stage, kind, folder, make=functools.partial(deferred, path))[0]
    assert difference(plain, ours) < 1e-5 and len(ours) > 8


def test_resuming_with_weights_that_are_not_read(ranks: Launcher, tmp_path: Path) -> None:
    path = saved(tmp_path, "llama")
    options = {"make": functools.partial(deferred, path)}
    through = ranks(2, timeout=120)(resume, 3, "llama", str(tmp_path / "whole"), 2, **options)[0]
    ranks(2, timeout=120)(resume, 3, "llama", str(tmp_path / "cut"), 1, **options)
    gone_on = ranks(2, timeout=120)(resume, 2, "llama", str(tmp_path / "cut"), None, **options)[0]
    assert difference(through[0], gone_on[0]) < 1e-5
    alone = ranks(1, timeout=120)(resume, 3, "llama", str(tmp_path / "cut"), None, num_train_epochs=3, **options)[0]
    assert len(alone[0]) > len(through[0]) and all(bool(value.isfinite().all()) for value in alone[1].values())


def test_pretrained_resuming_what_the_trainer_itself_saved(ranks: Launcher, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    ranks(2, timeout=120)(resume, None, "gpt2", folder, 1)
    shutil.copytree(folder, tmp_path / "other")
    plain = ranks(2, timeout=120)(resume, None, "gpt2", folder, None)[0]
    options = {"make": functools.partial(deferred, saved(tmp_path, "gpt2"))}
    ours = ranks(2, timeout=120)(resume, 3, "gpt2", str(tmp_path / "other"), None, **options)[0]
    assert difference(plain[0], ours[0]) < 1e-5


def by_accelerate(path: str, stage: int | None) -> list[float]:
    with fresh_state():
        accelerator: Any = make(stage)
        model = plainly(path, "llama") if stage is None else deferred(path, "llama")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for step in range(4):
            batch = torch.stack([row["input_ids"] for row in rows(16)])[2 * step + dist.get_rank() :: 8]
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_under_accelerate(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    path = saved(tmp_path, "llama")
    plain, ours = (ranks(2, timeout=120)(by_accelerate, path, each)[0] for each in (None, stage))
    assert plain[0] != plain[-1] and max(abs(a - b) for a, b in zip(plain, ours, strict=True)) < 1e-6


def with_own_seed(path: str) -> dict[str, Tensor]:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(dist.get_rank())
    model = from_pretrained(transformers.BertForSequenceClassification, path)
    return ZeroEngine(model, {"stage": 3}).full_state_dict()


def test_ranks_agree_on_what_is_initialised(ranks: Launcher, tmp_path: Path) -> None:
    path = saved(tmp_path, "bert")
    torch.manual_seed(0)
    expected = transformers.BertForSequenceClassification.from_pretrained(path).state_dict()
    for found in ranks(2)(with_own_seed, path):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("head", [False, True])
def test_an_adapter_on_weights_that_are_not_read(ranks: Launcher, tmp_path: Path, head: bool) -> None:
    path, folder = saved(tmp_path, "llama"), str(tmp_path / "run")
    by = [functools.partial(with_adapter, load, path, head) for load in (plainly, deferred)]
    plain, _ = ranks(2, timeout=120)(run, None, "llama", folder, make=by[0])[0]
    for stage in (1, 3):
        ours, state = ranks(2, timeout=120)(run, stage, "llama", folder, make=by[1])[0]
        assert difference(plain, ours) < 1e-5
        read = PeftModel.from_pretrained(build("llama"), f"{folder}/model").state_dict()
        assert all(torch.equal(state[name], value) for name, value in read.items())


def refusals(paths: dict[str, str]) -> list[str]:
    transformers.logging.set_verbosity_error()
    found = []
    for kind, change in (
        ("llama", lambda model: adapted("llama", model, use_dora=True)),
        ("llama", lambda model: model.resize_token_embeddings(60) and model),
        ("gpt2", lambda model: model.resize_token_embeddings(40) and model),  # tied
    ):
        with fresh_state():
            try:
                make(3).prepare(change(deferred(paths[kind], kind)))
            except ValueError as error:
                found.append(str(error))
    return found


def test_what_needs_the_weights_is_refused(ranks: Launcher, tmp_path: Path) -> None:
    for found in ranks(2)(refusals, {kind: saved(tmp_path, kind) for kind in ("llama", "gpt2")}):
        assert len(found) == 3
        assert all("transformers' own from_pretrained" in message for message in found), found


def in_place(model: Any) -> None:
    """Calls that torch lets through, though the parameter has no memory for it."""
    with torch.no_grad():
        model.lm_head.weight[0].zero_()


def replaced(model: Any) -> None:
    model.lm_head.weight.data = torch.full_like(model.lm_head.weight, 0.5)


def changed(path: str) -> dict[str, Any]:
    """Values that a parameter is given before the others are read."""
    found: dict[str, Any] = {}
    for change in (in_place, replaced):
        model = deferred(path, "llama")
        change(model)
        try:
            state = ZeroEngine(model, {"stage": 3}).full_state_dict()
            found[change.__name__] = state["lm_head.weight"], state["model.norm.weight"]
        except ValueError as error:
            found[change.__name__] = str(error)
    return found


def test_no_change_is_lost(ranks: Launcher, tmp_path: Path) -> None:
    path = saved(tmp_path, "llama")
    expected = plainly(path, "llama").state_dict()["model.norm.weight"]
    for found in ranks(2)(changed, path):
        assert "['lm_head.weight'] were written to before the weights" in found["in_place"]
        head, norm = found["replaced"]
        assert bool((head == 0.5).all()) and torch.equal(norm, expected)


def test_what_is_not_read_is_not_saved(tmp_path: Path) -> None:
    model = deferred(saved(tmp_path, "llama"), "llama")
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM are not read yet.*ZeroEngine first"):
        model.save_pretrained(tmp_path / "again")
    assert not list((tmp_path / "again").glob("*.safetensors"))
    state = Pair(model, torch.nn.Linear(2, 2)).state_dict()
    assert {name for name, value in state.items() if value.is_meta} == {n for n in state if n.startswith("one.")}
    head = adapted("llama", model, modules_to_save=["lm_head"])
    with pytest.raises(NotImplementedError, match="meta tensor"):
        head.save_pretrained(tmp_path / "again")


def after_a_failure(path: str) -> str:
    model = from_pretrained(transformers.BertModel, path)
    with pytest.raises(ValueError, match="no module is a 'Nothing'"):
        ZeroEngine(model, {"stage": 3, "units": {"classes": ["Nothing"]}})
    try:
        ZeroEngine(model, {"stage": 3})  # every one of its modules can be initialised
    except RuntimeError as error:
        return str(error)
    return "not refused"


def test_a_model_that_an_engine_failed_with_is_not_initialised(ranks: Launcher, tmp_path: Path) -> None:
    for said in ranks(2)(after_a_failure, saved(tmp_path, "bert")):
        assert "not read to the end" in said and "from_pretrained again" in said


class LoadsOtherwise(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """As a later version of transformers might."""

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(path, **options)


def test_a_model_that_was_loaded_whole_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"transformers [\d.]+ has loaded .*llama by itself"):
        from_pretrained(LoadsOtherwise, saved(tmp_path, "llama"))


def test_what_cannot_be_read_in_parts_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama")
    with pytest.raises(ValueError, match=r"device_map='auto'.*drop it"):
        from_pretrained(AutoModelForCausalLM, path, device_map="auto")
    state = load_file(f"{path}/model.safetensors")
    Path(path, "model.safetensors").unlink()
    torch.save(state, f"{path}/pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only safetensors.*save_pretrained"):
        from_pretrained(AutoModelForCausalLM, path)
    adapted("llama").save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"PeftModel\.from_pretrained"):
        from_pretrained(AutoModelForCausalLM, tmp_path / "adapter")


class Pair(torch.nn.Module):
    """Two pretrained models in one."""

    def __init__(self, one: torch.nn.Module, other: torch.nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other


def in_a_loop_of_ones_own(paths: dict[str, str]) -> bool:
    """The engine reads what a module has inside, in a copy of it, too."""
    transformers.logging.set_verbosity_error()
    expected = all_tensors(Pair(*(plainly(paths[kind], kind) for kind in ("gpt2", "llama"))))
    module = Pair(*(deferred(paths[kind], kind) for kind in ("gpt2", "llama")))
    with pytest.raises(RuntimeError, match="not read yet"):
        module.one(input_ids=torch.ones(1, 2, dtype=torch.long))
    equal = True
    for each in (copy.deepcopy(module), module):
        engine = ZeroEngine(each, {"stage": 3, "units": {"min_numel": 0}})
        values = {**all_tensors(each), **engine.full_state_dict()}
        each.one(input_ids=torch.ones(1, 2, dtype=torch.long))
        equal = equal and all(torch.equal(value, values[name]) for name, value in expected.items())
    return equal


def test_several_in_one_module_and_copies(ranks: Launcher, tmp_path: Path) -> None:
    assert all(ranks(2)(in_a_loop_of_ones_own, {kind: saved(tmp_path, kind) for kind in ("gpt2", "llama")}))


class Language(LightningModule):
    """A pretrained model under Lightning."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net.train()

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def under_lightning(path: str, load: Any, precision: Any) -> dict[str, Tensor]:
    module = Language(load(path, "llama"))
    lightning = trainers.trainer(trainers.zero(3), precision=precision)
    lightning.fit(module, torch.utils.data.DataLoader(rows(8), batch_size=2))
    return trainers.weights(module)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_under_lightning(ranks: Launcher, tmp_path: Path, precision: str) -> None:
    path = saved(tmp_path, "llama")
    plain, ours = (ranks(2)(under_lightning, path, load, precision)[0] for load in (plainly, deferred))
    assert plain.keys() == ours.keys() and all(torch.equal(plain[name], value) for name, value in ours.items())


def other_weights(path: str, other: str) -> bool:
    """Weights that the engine is told to read count; a parameter without memory and source is refused."""
    model = deferred(path, "llama")
    engine = ZeroEngine(model, {"stage": 3}, weights=other)
    found = engine.full_state_dict()
    with torch.device("meta"):
        head = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"other\.weight.*meta device"):
        ZeroEngine(Pair(deferred(path, "llama"), head), {"stage": 3})
    return all(torch.equal(found[name], value) for name, value in plainly(other, "llama").state_dict().items())


def test_other_weights_and_none(ranks: Launcher, tmp_path: Path) -> None:
    path = saved(tmp_path, "llama")
    shutil.copytree(path, tmp_path / "other")
    state = {name: value + 1 for name, value in load_file(f"{path}/model.safetensors").items()}
    save_file(state, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    assert all(ranks(2)(other_weights, path, str(tmp_path / "other")))


def in_a_script(path: str) -> bool:
    model = deferred(path, "gpt2")
    config = {"stage": 3, "units": {"min_numel": 0}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    engine, *_ = zero_strategy.initialize(model=model, config=config)
    found = engine.zero.full_state_dict()
    return all(torch.equal(value, found[name]) for name, value in plainly(path, "gpt2").state_dict().items())


def test_a_script_of_deepspeed_s(ranks: Launcher, tmp_path: Path) -> None:
    assert all(ranks(2)(in_a_script, saved(tmp_path, "gpt2")))


def saved_adapter(path: str, adapter: str) -> dict[str, Tensor]:
    with fresh_state():
        model = PeftModel.from_pretrained(deferred(path, "llama"), adapter)
        accelerator: Any = make(3)
        accelerator.prepare(model)
        return dict(accelerator.engine(model).full_state_dict())


def test_an_adapter_that_was_saved(ranks: Launcher, tmp_path: Path) -> None:
    model = adapted("llama", modules_to_save=["lm_head"])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    model.save_pretrained(tmp_path / "adapter")
    found = ranks(2)(saved_adapter, saved(tmp_path, "llama"), str(tmp_path / "adapter"))[0]
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def trained_experts(path: str, folder: str) -> None:
    with fresh_state():
        options: dict[str, Any] = {"make": lambda kind: from_pretrained(AutoModelForCausalLM, path), "max_steps": 2}
        trainer = trainer_of(3, "mixtral", Path(folder), save_strategy="steps", save_steps=2, **options)
        trainer.train()
        trainer.save_model(f"{folder}/model")


def test_what_was_converted_is_saved_as_it_can_be_read(ranks: Launcher, tmp_path: Path) -> None:
    path, model_class = fused_experts(tmp_path)
    ranks(2, timeout=120)(trained_experts, path, str(tmp_path / "run"))
    states = []
    for saved_to in ("checkpoint-2", "model"):
        again, info = model_class.from_pretrained(tmp_path / "run" / saved_to, output_loading_info=True)
        assert not any(info.values())
        states.append(again.state_dict())
        for wrong in ranks(2)(compare, str(tmp_path / "run" / saved_to), model_class, [3], {}):
            assert not wrong
    before = model_class.from_pretrained(path).state_dict()
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
    assert any(not torch.equal(states[0][name], value) for name, value in before.items())
