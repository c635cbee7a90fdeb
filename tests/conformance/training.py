"""Trains with a class of transformers, TRL or PEFT on this rank, and writes down the losses; a script itself.

    torchrun ... training.py KIND STAGE OUTPUT.json

STAGE `plain` is the class as it is, under DistributedDataParallel; a number is the same class under ZeRO. Both print
the numbers that the Trainer logs at each step.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.conformance import inference_server, offline

STEPS = 6
FOUR_BITS: dict[str, Any] = {
    "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32,
}  # fmt: skip
COMPARED = ("loss", "grad_norm", "eval_loss", "reward", "kl", "rewards/margins", "completions/mean_length")
"""What is compared of the numbers that a Trainer logs."""


def common(folder: str, **more: Any) -> dict[str, Any]:
    """Training arguments of all kinds."""
    return {
        "output_dir": folder, "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "logging_steps": 1, "learning_rate": 1e-3, "report_to": [], "seed": 11,
        "disable_tqdm": True, "bf16": False, "save_strategy": "no", "gradient_checkpointing": False, **more,
    }  # fmt: skip


def texts(count: int, *columns: str) -> Any:
    """A data set of sentences in these columns."""
    from datasets import Dataset

    chance = random.Random(4)
    return Dataset.from_list(
        [{column: offline.sentence(chance, chance.randint(3, 10)) for column in columns} for _ in range(count)]
    )


def adapter() -> Any:
    """A LoRA adapter."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def sft(wrap: Callable[[Any], Any], folder: str, extra: dict[str, Any], **more: Any) -> Any:
    """Supervised fine-tuning (TRL), with evaluation."""
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(**common(folder, max_length=32, eval_strategy="steps", eval_steps=3))
    return wrap(SFTTrainer)(
        model=offline.causal_model(), args=arguments, train_dataset=texts(96, "text"), eval_dataset=texts(16, "text"),
        processing_class=offline.tokenizer(), **more, **extra,
    )  # fmt: skip


def sft_qlora(wrap: Callable[[Any], Any], folder: str, extra: dict[str, Any], **bits: Any) -> Any:
    """Supervised fine-tuning of a LoRA adapter on weights of 4 bits (TRL, PEFT and bitsandbytes)."""
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    import zero_strategy.integrations.transformers as ours

    files = Path(folder) / "base"
    offline.causal_model().save_pretrained(files)
    config = BitsAndBytesConfig(**bits) if bits else BitsAndBytesConfig(load_in_4bit=True, **FOUR_BITS)
    options = {"dtype": torch.float32, "quantization_config": config}
    if extra:
        model = ours.from_pretrained(AutoModelForCausalLM, files, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(files, **options)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    arguments = SFTConfig(**common(folder, max_length=32, eval_strategy="steps", eval_steps=3))
    trainer = wrap(SFTTrainer)(
        model=model, args=arguments, train_dataset=texts(96, "text"), eval_dataset=texts(16, "text"),
        processing_class=offline.tokenizer(), peft_config=adapter(), **extra,
    )  # fmt: skip
    # TRL has cast them to bfloat16: what torch's norm of such gradients loses (0.4 %) would be all that is seen.
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return trainer


def sft_lora_int8(wrap: Callable[[Any], Any], folder: str, extra: dict[str, Any]) -> Any:
    """The same on weights of 8 bits."""
    return sft_qlora(wrap, folder, extra, load_in_8bit=True)


def sft_lora(wrap: Callable[[Any], Any], folder: str, extra: dict[str, Any]) -> Any:
    """Supervised fine-tuning of a LoRA adapter (TRL and PEFT)."""
    return sft(wrap, folder, extra, peft_config=adapter())


def dpo(wrap: Callable[[Any], Any], folder: str, extra: dict[str, Any]) -> Any:
    """Direct preference optimization (TRL) against a reference model."""
    from trl import DPOConfig, DPOTrainer

    return wrap(DPOTrainer)(
        model=offline.causal_model(), ref_model=offline.causal_model(6), args=DPOConfig(**common(folder)),
        train_dataset=texts(96, "prompt", "chosen", "rejected"), processing_class=offline.tokenizer(), **extra,
    )  # fmt: skip


def reward(completions: list[str], **_: Any) -> list[float]:
    """The number of different words, in tenths."""
    return [len(set(completion.split())) / 10 for completion in completions]


def grpo(wrap: Callable[[Any], Any], folder: str, extra: dict[str, Any]) -> Any:
    """Group relative policy optimization (TRL): completions are generated by the model in training."""
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(**common(folder, num_generations=4, max_completion_length=8, beta=0.0))
    return wrap(GRPOTrainer)(
        model=offline.causal_model(), reward_funcs=reward, args=arguments, train_dataset=texts(64, "prompt"),
        processing_class=offline.tokenizer(), **extra,
    )  # fmt: skip


def grpo_with_server(wrap: Callable[[Any], Any], folder: str, extra: dict[str, Any], **more: Any) -> Any:
    """Group relative policy optimization (TRL): a stand-in for vLLM's server loads the weights at each step."""
    from trl import GRPOConfig, GRPOTrainer

    inference_server.install()
    options = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_correction": False}
    arguments = GRPOConfig(**common(folder, num_generations=4, max_completion_length=8, beta=0.0, **options))
    return wrap(GRPOTrainer)(
        model=offline.causal_model(), reward_funcs=reward, args=arguments, train_dataset=texts(64, "prompt"),
        processing_class=offline.tokenizer(), **more, **extra,
    )  # fmt: skip


def grpo_with_server_lora(wrap: Callable[[Any], Any], folder: str, extra: dict[str, Any]) -> Any:
    """The same with a LoRA adapter (PEFT), which is merged for the server."""
    return grpo_with_server(wrap, folder, extra, peft_config=adapter())


def rewards(wrap: Callable[[Any], Any], folder: str, extra: dict[str, Any]) -> Any:
    """A reward model (TRL)."""
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(5)
    base = offline.causal_model().config
    base.num_labels = 1
    return wrap(RewardTrainer)(
        model=LlamaForSequenceClassification(base), args=RewardConfig(**common(folder)),
        train_dataset=texts(96, "chosen", "rejected"), processing_class=offline.tokenizer(), **extra,
    )  # fmt: skip


def causal_lm(wrap: Callable[[Any], Any], folder: str, extra: dict[str, Any], make: Any = None) -> Any:
    """A language model (transformers), with clipping and gradient checkpointing."""
    from transformers import Trainer, TrainingArguments

    chance = torch.Generator().manual_seed(9)
    rows = torch.randint(4, 60, (96, 24), generator=chance)
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(**common(folder, gradient_checkpointing=True, max_grad_norm=0.5))
    model = offline.causal_model() if make is None else make()
    return wrap(Trainer)(model=model, args=arguments, train_dataset=data, **extra)


def peft_lora(wrap: Callable[[Any], Any], folder: str, extra: dict[str, Any]) -> Any:
    """A LoRA adapter of a language model (transformers and PEFT)."""
    from peft import get_peft_model

    def adapted() -> Any:
        model = offline.causal_model()
        model.enable_input_require_grads()
        return get_peft_model(model, adapter())

    return causal_lm(wrap, folder, extra, adapted)


KINDS: dict[str, Callable[..., Any]] = {
    "transformers-causal-lm": causal_lm,
    "transformers-peft-lora": peft_lora,
    "trl-sft": sft,
    "trl-sft-lora": sft_lora,
    "trl-sft-qlora": sft_qlora,
    "trl-sft-lora-int8": sft_lora_int8,
    "trl-dpo": dpo,
    "trl-grpo": grpo,
    "trl-grpo-server": grpo_with_server,
    "trl-grpo-server-lora": grpo_with_server_lora,
    "trl-reward": rewards,
}
"""By the names of the command line."""


def main() -> None:
    """Train, and write the logged numbers as JSON: a list of mappings, one per logged event."""
    kind, stage, output = sys.argv[1:]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        if stage == "plain":
            trainer = KINDS[kind](lambda trainer: trainer, folder, {})
        else:
            from zero_strategy.integrations.transformers import make_zero_trainer

            trainer = KINDS[kind](make_zero_trainer, folder, {"zero_config": {"stage": int(stage)}})
        compared = inference_server.compare_after_syncs(trainer) if hasattr(trainer, "vllm_generation") else None
        trainer.train()
        assert compared is None or not trainer.is_world_process_zero() or len(compared) == STEPS
        logged = [{key: entry[key] for key in COMPARED if key in entry} for entry in trainer.state.log_history]
    if int(os.environ["RANK"]) == 0:
        Path(output).write_text(json.dumps([entry for entry in logged if entry]), encoding="utf-8")


if __name__ == "__main__":
    main()
