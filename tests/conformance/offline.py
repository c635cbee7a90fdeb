"""Small stand-ins for what scripts take from the Hugging Face hub: a tokenizer, texts, models, a metric.

They replace data, never code under test: with a network the scripts would run on larger data.
"""

from __future__ import annotations

import random
from typing import Any

import torch

WORDS = [f"word{number}" for number in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def tokenizer(*names: Any, **options: Any) -> Any:
    """A word-level tokenizer for pairs of sentences; called like `AutoTokenizer.from_pretrained`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [("[CLS]", words["[CLS]"]), ("[SEP]", words["[SEP]"])]
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        bos_token="[CLS]", eos_token="[SEP]", model_max_length=64,
    )  # fmt: skip


def sentence(chance: random.Random, length: int) -> str:
    """So many words."""
    return " ".join(chance.choice(WORDS) for _ in range(length))


def paraphrases(name: str, part: str, split: str | None = None, **options: Any) -> Any:
    """Pairs of sentences with a label, in the columns of GLUE's MRPC; called like `datasets.load_dataset`."""
    from datasets import Dataset, DatasetDict

    def rows(seed: int, count: int) -> Any:
        chance = random.Random(seed)
        columns: dict[str, list[Any]] = {"sentence1": [], "sentence2": [], "label": [], "idx": []}
        for number in range(count):
            first = sentence(chance, chance.randint(3, 12))
            same = chance.random() < 0.5
            columns["sentence1"].append(first)
            columns["sentence2"].append(first if same else sentence(chance, chance.randint(3, 12)))
            columns["label"].append(int(same))
            columns["idx"].append(number)
        return Dataset.from_dict(columns)

    splits = DatasetDict({"train": rows(0, 128), "validation": rows(1, 37)})  # 37: a last batch that is not full
    return splits if split is None else splits[split]


def classifier(*names: Any, **options: Any) -> Any:
    """A tiny BERT; called like `AutoModelForSequenceClassification.from_pretrained`."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


class Metric:
    """Accuracy and F1; called like `evaluate.load("glue", "mrpc")`."""

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        """Take predictions and references of one batch."""
        self._pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self) -> dict[str, float]:
        """The metric over all batches since the last call."""
        pairs, self._pairs = self._pairs, []
        true = sum(1 for found, wanted in pairs if found == wanted == 1)
        wrong = sum(1 for found, wanted in pairs if found != wanted)
        return {
            "accuracy": sum(1 for found, wanted in pairs if found == wanted) / len(pairs),
            "f1": 2 * true / max(2 * true + wrong, 1),
        }


def causal_model(seed: int = 5) -> Any:
    """A tiny Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return LlamaForCausalLM(config)
