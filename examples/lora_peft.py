"""Fine-tune a causal model with LoRA (PEFT) and the Trainer of transformers, its frozen weights sharded, too (ZeRO-3).

``accelerate launch --config_file configs/accelerate/cpu2.yaml examples/lora_peft.py --base outputs/transformers/model``

The base is what ``transformers_gpt.py`` has saved, or any Llama over bytes; without one the run makes a small one with
random weights. Each rank reads its own slices of it. The task is a text that the base has not seen: the same one in
capitals. In the end the adapter is saved, and loaded again by plain PEFT, which finds the same loss.

``--quantize nf4`` is QLoRA: each rank quantises the weights whose slices it reads, by bitsandbytes.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import BitsAndBytesConfig, LlamaForCausalLM, TrainingArguments, set_seed

from stdlib_data import EvenWindows, RandomWindows, read_corpus
from transformers_gpt import Labelled, tiny_llama
from zero_strategy import ZeroTrainer
from zero_strategy.integrations.transformers import from_pretrained


def in_capitals(text: Tensor) -> Tensor:
    """The bytes with a to z replaced by A to Z."""
    small = (text >= ord("a")) & (text <= ord("z"))
    return torch.where(small, text - 32, text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="directory of the model; default: FOLDER/base, made if missing")
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3), help="of ZeRO")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, those before --resume included")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per process")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--rank", type=int, default=8, help="of the adapter's matrices")
    parser.add_argument("--quantize", choices=("nf4", "int8"), help="kind of frozen base weights; default: as they are")
    parser.add_argument("--block-size", type=int, default=64, help="bytes per window")
    parser.add_argument("--folder", type=Path, default=Path("outputs/lora"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    return parser.parse_args(argv)


def quantization(kind: str | None) -> dict[str, Any]:
    """The argument of ``from_pretrained`` that quantises; none for weights as they are."""
    if kind is None:
        return {}
    if kind == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options)}


@torch.no_grad()
def loss_of_saved(base: Path, adapter: Path, data: Labelled, kind: str | None) -> float:
    """The mean loss of a saved adapter on its base, in one process and without this package."""
    plain = LlamaForCausalLM.from_pretrained(base, **quantization(kind))
    model = PeftModel.from_pretrained(plain, str(adapter)).eval()
    rows = (data[index] for index in range(len(data)))
    return sum(model(**{key: value[None] for key, value in row.items()}).loss.item() for row in rows) / len(data)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, save, load again; the loss before and after, and that of the loaded adapter (on the first process)."""
    args = parse(argv)
    settings = TrainingArguments(
        output_dir=str(args.folder),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        save_steps=20,
        logging_steps=10,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        seed=1234,
    )
    set_seed(settings.seed)
    base = args.base or args.folder / "base"
    with settings.main_process_first():
        if args.base is None and not base.exists():
            tiny_llama(hidden_size=128, layers=2).save_pretrained(base)

    # No process ever holds all of it.
    frozen = from_pretrained(LlamaForCausalLM, base, **quantization(args.quantize))
    frozen.requires_grad_(False)
    model = get_peft_model(frozen, LoraConfig(task_type="CAUSAL_LM", r=args.rank, target_modules="all-linear"))
    corpus = read_corpus()
    train, validation = in_capitals(corpus.train), in_capitals(corpus.validation)
    held_out = Labelled(EvenWindows(validation, 32, args.block_size))
    trainer = ZeroTrainer(
        model,
        settings,
        zero_config={"stage": args.stage},
        train_dataset=Labelled(RandomWindows(train, 2**16, args.block_size, settings.seed)),
        eval_dataset=held_out,
    )
    found = {"before": trainer.evaluate()["eval_loss"]}
    trainer.train(resume_from_checkpoint=args.resume)
    found["after"] = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(args.folder / "adapter"))

    if trainer.is_world_process_zero():
        found["loaded"] = loss_of_saved(base, args.folder / "adapter", held_out, args.quantize)
        losses = ", ".join(f"{loss:.4f} {name}" for name, loss in found.items())
        print(f"loss per byte in capitals: {losses}; adapter: {args.folder / 'adapter'}")
    return found


if __name__ == "__main__":
    main()
