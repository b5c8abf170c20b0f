"""Secrets in URLs and arguments are masked; the rest is shown."""

from __future__ import annotations

import pytest

from elastic.settings.masking import masked_arguments, masked_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://AKIA:hunter2@bucket/run", "s3://***@bucket/run"),
        ("https://h/c?sv=1&sig=hunter2&x=2", "https://h/c?sv=1&sig=***&x=2"),
        ("https://h/c?access_token=hunter2", "https://h/c?access_token=***"),
        ("abfs://container@account/run", "abfs://container@account/run"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("/checkpoints/a:b@c", "/checkpoints/a:b@c"),
    ],
)
def test_secrets_in_urls_are_masked(url: str, shown: str) -> None:
    assert masked_url(url) == shown


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["train.py", "--api-key", "hunter2", "--lr", "1"], "train.py --api-key *** --lr 1"),
        (["train.py", "--wandb-token=hunter2"], "train.py --wandb-token=***"),
        (["train.py", "db.password=hunter2", "model=x"], "train.py db.password=*** model=x"),
        (["train.py", "WANDB_API_KEY=a=b"], "train.py WANDB_API_KEY=***"),
        (["train.py", "--data", "s3://k:hunter2@b/d"], "train.py --data s3://***@b/d"),
        (["train.py", "--token", "--lr", "1"], "train.py --token --lr 1"),
        (
            ["train.py", "--tokenizer", "gpt2", "--tokens", "5"],
            "train.py --tokenizer gpt2 --tokens 5",
        ),
        (["train.py", "token"], "train.py token"),
    ],
)
def test_secrets_in_arguments_are_masked(arguments: list[str], shown: str) -> None:
    assert " ".join(masked_arguments(arguments)) == shown
