"""Hugging Face's Trainer with a tiny GPT-2, on arithmetic that it makes up. No network is needed.

    elastic run --nproc-per-node 3 examples/transformers_gpt2.py
    python examples/transformers_gpt2.py                              # the same, as a world of one

Kill a worker while it trains: the others go on with the same step. The lines with `elastic` are the
only ones that differ from a script for Trainer alone.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import elastic
from elastic.transformers import attach

LETTERS = "0123456789+=."


def tokenizer_of() -> PreTrainedTokenizerFast:
    """One token for each character, and one for padding."""
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=".")  # type: ignore[no-any-return]


@dataclass
class Sums(Dataset[dict[str, list[int]]]):
    """Sums as "12+7=19.": of different lengths, the same at each index."""

    tokenizer: PreTrainedTokenizerFast
    size: int
    seed: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        draw = random.Random(f"{self.seed}/{index}")
        a, b = draw.randrange(100), draw.randrange(100)
        return {"input_ids": self.tokenizer(f"{a}+{b}={a + b}.")["input_ids"]}


def model_of(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=16,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    session = elastic.init()
    tokenizer = tokenizer_of()
    arguments: dict[str, Any] = {
        "output_dir": "checkpoints/transformers_gpt2",
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "logging_steps": 20,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "report_to": [],
        "disable_tqdm": True,
    }
    model = model_of(tokenizer)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=Sums(tokenizer, size=2048, seed=0),
        eval_dataset=Sums(tokenizer, size=256, seed=1),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    attach(trainer, session)
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        prompt = tokenizer("12+7=", return_tensors="pt").to(session.device)
        model.train(False)
        answer: Any = model.generate(**prompt, max_new_tokens=4, do_sample=False)
        print("12+7=" + "".join(tokenizer.convert_ids_to_tokens(answer[0][5:].tolist())))


if __name__ == "__main__":
    main()
