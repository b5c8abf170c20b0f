"""Trains a tiny GPT-2 with TRL's SFTTrainer: trainer_sft.py OUTPUT [plain]. Rank 1 is killed in the
fifth step, once."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import elastic
from elastic.transformers import attach

OUTPUT, PLAIN = Path(sys.argv[1]), "plain" in sys.argv
OUTPUT.mkdir(parents=True, exist_ok=True)
session = None if PLAIN else elastic.init()
LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Kill(TrainerCallback):
    def on_pre_optimizer_step(self, _args, state, _control, **_):
        marker = OUTPUT / "killed-0"
        dies = session is not None and session.rank == 1 and state.global_step == 5
        if dies and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


tokenizer = Tokenizer(models.WordLevel({c: n for n, c in enumerate([*LETTERS, "<pad>"])}, "<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token=" ", model_max_length=64
)
texts = [LETTERS[i % 5 :] * (1 + i % 2) for i in range(48)]
torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        **{"vocab_size": 28, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **{"bos_token_id": 26, "eos_token_id": 26, "loss_type": "ForCausalLM"},
    )
).double()
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=str(OUTPUT),
        per_device_train_batch_size=12 if PLAIN else 2,
        num_train_epochs=3,
        learning_rate=3e-3,
        logging_steps=2,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    callbacks=[Kill()],
)
if session is not None:
    attach(trainer, session, global_batch=12)
trainer.train()
if trainer.is_world_process_zero():
    torch.save(trainer.model.state_dict(), OUTPUT / "weights.pt")
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    (OUTPUT / "result.json").write_text(json.dumps(history))
