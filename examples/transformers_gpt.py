"""Train a small Llama on bytes with the Trainer of transformers, sharded by ZeRO: evaluation, checkpoints, resuming.

``accelerate launch --config_file configs/accelerate/cpu2.yaml examples/transformers_gpt.py --steps 60``

The run evaluates and saves along the way; ``--resume`` goes on from its last checkpoint, under any other stage and
number of processes. At the end the weights are saved as ``from_pretrained`` reads them, without this package.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from stdlib_data import EvenWindows, RandomWindows, read_corpus
from zero_strategy import ZeroTrainer


class Labelled(Dataset[dict[str, Tensor]]):
    """Windows of bytes as the keywords of a causal model, which shifts the labels itself."""

    def __init__(self, windows: RandomWindows | EvenWindows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def tiny_llama(hidden_size: int, layers: int) -> LlamaForCausalLM:
    """A Llama over the 256 bytes, with new weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3), help="of ZeRO")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, those before --resume included")
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations and between checkpoints")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per process and micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=64, help="bytes per window")
    parser.add_argument("--folder", type=Path, default=Path("outputs/transformers"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    """Train, evaluate and save; what the Trainer has logged."""
    args = parse(argv)
    settings = TrainingArguments(
        output_dir=str(args.folder),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=args.every,
        save_steps=args.every,
        save_total_limit=2,
        logging_steps=5,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        seed=1234,
    )
    set_seed(settings.seed)
    corpus = read_corpus()
    trainer = ZeroTrainer(
        tiny_llama(args.hidden_size, args.layers),
        settings,
        zero_config={"stage": args.stage},
        train_dataset=Labelled(RandomWindows(corpus.train, 2**16, args.block_size, settings.seed)),
        eval_dataset=Labelled(EvenWindows(corpus.validation, 64, args.block_size)),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(str(args.folder / "model"))

    if trainer.is_world_process_zero():
        model: Any = LlamaForCausalLM.from_pretrained(args.folder / "model")  # plain transformers, in one process
        prompt = torch.tensor([list(b"def main(")])
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=True)
        print(f"a sample: {bytes(text[0].tolist())!r}")
    history: list[dict[str, float]] = trainer.state.log_history
    return history


if __name__ == "__main__":
    main()
