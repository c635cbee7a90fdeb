"""Under `sharding.Init` a model's own code decides every value, as if it were built plainly and sharded then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.live import live_bytes, only_new
from tests.launcher import Launcher
from zero_strategy import fsdp as sharding
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.released import ShardedParameter
from zero_strategy.pipeline import LayerSpec, PipelineModule

WIDTH = 8


class Zeroing(nn.Linear):
    """Writes its own weight when the constructor that it extends is over."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        nn.init.zeros_(self.weight)
        self.bias.data.fill_(0.25)


class Gpt(nn.Module):
    """Initialises as GPT-2 does: `apply`, then by name; a tie, a parameter of its own, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(3, WIDTH))
        self.embedding = nn.Embedding(7, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self.init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("0.bias"):
                parameter.data.normal_(std=0.02)
        self.blocks[1][0].weight.requires_grad_(False)  # type: ignore[index]
        with torch.no_grad():
            self.position[0] = self.embedding.weight[1] * 2

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[module.padding_idx].zero_()


class Parent(nn.Module):
    """Writes into children, looks at what they hold, and builds after that by what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Zeroing(WIDTH)
        self.second = nn.Conv1d(4, 6, 3)
        nn.init.constant_(self.second.bias, 3.0)  # type: ignore[arg-type]
        self.second.weight.data.fill_(float(self.first.bias.sum()))
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(WIDTH)).mul_(2)
            self.first.weight[0, 1] = float(self.second.weight.norm())
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.load_state_dict(copy.deepcopy(self.first.state_dict()))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(5)) for _ in range(3)])
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(1)), "b": nn.Parameter(torch.arange(3.0))})
        linear = nn.Linear(WIDTH, WIDTH)
        self.clones = nn.ModuleList([copy.deepcopy(linear) for _ in range(3)])
        whole = torch.randn(6, 4)
        self.transposed = nn.Parameter(whole.t())
        self.viewed = nn.Parameter(whole[:2])
        self.whole = whole  # holds what `viewed` is a view of
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)


def normalised() -> nn.Module:
    torch.nn.utils.parametrizations.weight_norm(linear := nn.Linear(WIDTH, 5))
    return nn.Sequential(linear, torch.nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)))


def after_the_block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16), 3)


MODELS: list[Callable[[], nn.Module]] = [
    Gpt, Parent, Lists, normalised, encoder,
    lambda: nn.MultiheadAttention(WIDTH, 2, kdim=5, vdim=3),
    lambda: nn.Transformer(WIDTH, 2, 2, 2, 16),
    lambda: nn.LSTM(WIDTH, 5, num_layers=2, bidirectional=True),
    lambda: nn.GRUCell(WIDTH, 5),
    lambda: nn.Sequential(nn.Bilinear(3, 4, 5), nn.PReLU(), nn.GroupNorm(2, 4), nn.EmbeddingBag(7, 3)),
    lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.BatchNorm2d(3), nn.InstanceNorm2d(3, affine=True)),
    lambda: nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 20, [5, 10]),
]  # fmt: skip


def built(make: Callable[[], nn.Module], init: bool) -> nn.Module:
    torch.manual_seed(5 + (dist.get_rank() if init else 0))  # rank 0's values count
    with sharding.Init(enabled=init):
        return make()


def compare(make: Callable[[], nn.Module], stage: int) -> list[str]:
    """Differences between a model that is built plainly, and one under `Init` that an engine has."""
    plain = built(make, init=False)
    drawn = torch.rand(1)
    model = built(make, init=True)
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    objects = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    wrong = [] if dist.get_rank() or torch.rand(1).equal(drawn) else ["random numbers drawn"]
    for name, parameter in model.named_parameters():
        other = plain.get_parameter(name)
        facts = [(p.shape, p.dtype, p.requires_grad, p.stride(), p.is_leaf) for p in (parameter, other)]
        wrong += [f"{name}: {facts}"] if facts[0] != facts[1] else []
        whole = name in ("transposed", "viewed") or parameter.numel() == 0  # the model holds what those are views of
        wrong += [f"{name}: {type(parameter)}"] if isinstance(parameter, ShardedParameter) is whole else []
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}))
    wrong += [name for name, p in model.named_parameters(remove_duplicate=False) if objects[name] != id(p)]
    wrong += [name for name, p in model.named_parameters() if isinstance(p, ShardedParameter)]
    state, expected = engine.full_state_dict(), plain.state_dict()
    wrong += [f"{name} is missing" for name in expected.keys() - state.keys()]
    wrong += [f"{name} differs" for name, value in expected.items() if not torch.equal(state[name], value)]
    engine.close()
    return wrong if names == [*dict(plain.named_parameters()), *dict(plain.named_buffers())] else ["names", *wrong]


def compare_all(stage: int, numbers: range) -> list[str]:
    return [f"{number}: {text}" for number in numbers for text in compare(MODELS[number], stage)]


def test_values_are_those_of_a_plain_construction(ranks: Launcher) -> None:
    """All at stage 3 on two ranks; of the models, every other one at stage 2, and the others on three ranks."""
    for world, stage, numbers in ((2, 3, range(len(MODELS))), (2, 2, range(1, 12, 2)), (3, 3, range(0, 12, 2))):
        for wrong in ranks(world)(compare_all, stage, numbers):
            assert not wrong


# ------------------------------------------------------------------------------------------------- transformers


def small(family: str) -> Callable[[], nn.Module]:
    """A model of a family, from a configuration with two layers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    more: dict[str, dict[str, Any]] = {
        "llama": {"num_key_value_heads": 1, "vocab_size": 40},
        "mistral": {"num_key_value_heads": 1, "vocab_size": 40, "head_dim": 8},
        "qwen2": {"num_key_value_heads": 1, "vocab_size": 40},
        "gemma": {"num_key_value_heads": 1, "vocab_size": 40, "head_dim": 8},
        "mixtral": {"num_key_value_heads": 1, "vocab_size": 40, "num_local_experts": 2},
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 8},
        "opt": {"ffn_dim": 24, "vocab_size": 40, "word_embed_proj_dim": 16, "max_position_embeddings": 8},
        "bert": {"vocab_size": 40, "max_position_embeddings": 8},
        "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 40},
        "vit": {"image_size": 8, "patch_size": 4},
        "clip_text_model": {"vocab_size": 40, "max_position_embeddings": 8},
        "whisper": {
            "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 40,
            "max_source_positions": 8, "max_target_positions": 8, "num_mel_bins": 4, "pad_token_id": 0,
        },
    }  # fmt: skip
    own = more[family] if family in ("gpt2", "t5", "whisper") else sizes | more[family]
    config = transformers.AutoConfig.for_model(family, **own)
    head = transformers.AutoModelForCausalLM if family in ("llama", "gpt2") else transformers.AutoModel
    return lambda: head.from_config(config)  # type: ignore[no-any-return]


FAMILIES = [
    "llama", "mistral", "qwen2", "gemma", "mixtral", "gpt2", "opt", "bert", "t5", "vit", "clip_text_model", "whisper",
]  # fmt: skip


def compare_families() -> list[str]:
    return [f"{family}: {text}" for family in FAMILIES for text in compare(small(family), 3)]


def test_transformers_of_twelve_families(ranks: Launcher) -> None:
    pytest.importorskip("transformers")
    for wrong in ranks(2, timeout=120)(compare_families):
        assert not wrong


# ------------------------------------------------------------------------------------------- what is whole when


class Measured(nn.Linear):
    """Notes how many bytes are alive whenever one is constructed or initialised."""

    peak = 0

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)
        self.note()

    def note(self) -> None:
        Measured.peak = max(Measured.peak, live_bytes())


class Tower(nn.Module):
    """Layers in lists, in blocks with a parameter of their own, and as copies; then initialised by `apply`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.listed = nn.ModuleList([Measured(width) for _ in range(8)])
        self.blocks = nn.Sequential(*[Block(width) for _ in range(4)])
        self.copies = nn.ModuleList([copy.deepcopy(self.blocks[0]) for _ in range(4)])
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Measured):
            nn.init.normal_(module.weight)
            module.weight.data.mul_(0.5)
            module.note()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, width))
        self.inner = nn.Sequential(Measured(width), Measured(width))


def bytes_while_built(width: int) -> tuple[float, float, float]:
    """The peak of the construction, what is left after it, and the same for a later pass: in units of a layer."""
    layer = 4 * width * width
    with only_new():
        before = live_bytes()
        Measured.peak = 0
        with sharding.Init():
            model = Tower(width)
        built, left = Measured.peak - before, live_bytes() - before
        Measured.peak = 0
        model.apply(model.init_weights)
        return built / layer, left / layer, (Measured.peak - before) / layer


def test_a_rank_holds_its_slices_and_the_module_being_built(ranks: Launcher) -> None:
    layers = 8 + 4 * 3 + 4 * 3
    for world in (2, 4):
        for peak, left, later in ranks(world)(bytes_while_built, 96):
            slices = layers / world
            assert slices <= left <= slices + 1.01, "a thread may not have let go of its last message yet"
            assert peak <= slices + 3.1, "a block, of three layers"
            assert later <= slices + 3.1


def used_before_an_engine() -> dict[str, Any]:
    """Values that are read and written between the block and the engine, in all the ways that scripts do."""
    plain, model = built(Gpt, init=False), built(Gpt, init=True)
    found: dict[str, Any] = {}
    for one in (plain, model):
        one.to(torch.float64).float()
        with torch.no_grad():
            one.position.add_(1)  # type: ignore[operator]
        one.get_parameter("embedding.weight").data *= 2
        one.load_state_dict({"position": torch.full((3, WIDTH), 7.0)}, strict=False)
        with pytest.raises(RuntimeError, match="size mismatch"):
            one.load_state_dict({"position": torch.zeros(2)}, strict=False)
        with pytest.raises(RuntimeError, match="must match the size"):
            one.position.data.copy_(torch.zeros(4, 4))  # type: ignore[union-attr]
    rank = dist.get_rank()
    bias = model.get_parameter("blocks.0.0.bias")
    with sharding.GatheredParameters(bias, modifier_rank=1):
        if rank == 1:
            bias.data.fill_(9.0)
    plain.get_parameter("blocks.0.0.bias").data.fill_(9.0)
    tokens = torch.tensor([[1, 2, 3]])
    norm = model.embedding(tokens).norm()  # type: ignore[operator]
    norm.backward()  # its graph and the gradient keep the values
    plain.embedding(tokens).norm().backward()  # type: ignore[operator]
    found["gradient"] = torch.equal(*(m.get_parameter("embedding.weight").grad for m in (plain, model)))  # type: ignore[arg-type]
    model.zero_grad()
    found["text"] = repr(model.get_parameter("blocks.2.0.weight"))
    copied = copy.deepcopy(model)
    found["copied"] = isinstance(copied.get_parameter("blocks.2.0.weight"), ShardedParameter)
    for one in (model, copied):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        engine = ZeroEngine(one, load_config(stage=3, units={"min_numel": 0}))
        engine.attach(optimizer)
        state, expected = engine.full_state_dict(), plain.state_dict()
        found[f"values {len(found)}"] = all(torch.equal(state[name], value) for name, value in expected.items())
    return found


def test_parameters_used_before_an_engine(ranks: Launcher) -> None:
    for found in ranks(2)(used_before_an_engine):
        assert found.pop("text").startswith("Parameter containing:\nLinear.weight, shape (8, 8), of which each rank")
        assert all(found.values()), found


def after_an_error_in_a_scope() -> list[bool]:
    """True where the weight is sharded: inside of the outer scope, which keeps it whole, and at the end."""
    with sharding.Init():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        with sharding.GatheredParameters(model[0].weight):
            with pytest.raises(KeyError), sharding.GatheredParameters(model[0].weight, modifier_rank=1):
                raise KeyError
            model.append(nn.Linear(WIDTH, WIDTH))
            inside = isinstance(model[0].weight, ShardedParameter)
    return [inside, isinstance(model[0].weight, ShardedParameter)]


def test_a_scope_that_an_error_ends_keeps_nothing_whole(ranks: Launcher) -> None:
    assert ranks(2)(after_an_error_in_a_scope) == [[False, True]] * 2


def after_an_error_on_the_way_in() -> bool:
    other = nn.Linear(WIDTH, WIDTH)
    ZeroEngine(other, load_config(stage=1))
    with sharding.Init():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        with (
            pytest.raises(ValueError, match="modifier_rank 7"),
            sharding.GatheredParameters([model[0].weight, other.weight], modifier_rank=7),
        ):
            pass
    return isinstance(model[0].weight, ShardedParameter)


def test_a_scope_that_is_refused_keeps_nothing_whole(ranks: Launcher) -> None:
    assert ranks(2)(after_an_error_on_the_way_in) == [True, True]


def by_one_rank(how: str) -> str:
    rank = dist.get_rank()
    try:
        with sharding.Init():
            model: Any = Gpt() if how != "other models" or rank else nn.Linear(2, 2)
            if how == "one looks":
                model.blocks[2 * rank][0].weight.norm()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("how", ["other models", "one looks"])
def test_ranks_that_do_different_things_are_told(ranks: Launcher, how: str) -> None:
    for text in ranks(2)(by_one_rank, how):
        assert "All ranks must build the same model" in text
        assert "(Linear.weight, shape (" in text or "(Embedding.weight, shape (" in text


def test_one_process_builds_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    with sharding.Init():
        model = nn.Linear(2, 2)
    assert type(model.weight) is nn.Parameter
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"init_distributed\(\).*configure_model"), sharding.Init():
        raise AssertionError


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with sharding.Init():  # as a library does whose caller does so as well
            self.outer = nn.Linear(WIDTH, WIDTH)
        layers = [LayerSpec(nn.Linear, WIDTH, 2 + number, bias=False) for number in range(2)]
        self.stages = PipelineModule(layers, num_stages=2, seed_layers=True)
        self.last = Zeroing(WIDTH)


def built_apart() -> tuple[list[str], bool]:
    model = built(Holder, init=True)
    sharded = [name for name, p in model.named_parameters() if isinstance(p, ShardedParameter)]
    plain = built(lambda: nn.Linear(WIDTH, WIDTH), init=False)
    return sharded, torch.equal(model.outer.weight, plain.weight)  # type: ignore[union-attr,arg-type]


def test_a_pipeline_inside_builds_its_own_stage_plainly(ranks: Launcher) -> None:
    for sharded, equal in ranks(2)(built_apart):
        assert sharded == ["outer.weight", "outer.bias", "last.weight", "last.bias"]
        assert equal
