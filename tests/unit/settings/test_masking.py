"""No secret in a URL or an argument is shown, however it is passed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigurationError
from elastic.settings.masking import masked_arguments, masked_url
from elastic.settings.node import NodeSettings
from elastic.settings.sources import DeviceCounts, load_settings, shown

_PARTS = st.lists(st.sampled_from([*"@:/?&;#= \n", "://", "hunter2", "s3", "--"]), max_size=8)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("abfs://container@account/run", "abfs://container@account/run"),
        ("/checkpoints/a:b@c", "/checkpoints/a:b@c"),
        ("s3://AKIA:hunter2@bucket/run", "s3://***@bucket/run"),
        ("https://h/c?sv=1&sig=hunter2", "https://h/c?sv=***&sig=***"),
    ],
)
def test_what_identifies_a_url_is_shown(url: str, shown: str) -> None:
    assert masked_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hunter2@bucket/run",
        "s3://:hunter2@bucket/run",
        "s3://user:a/hunter2@bucket/run",
        "s3://user:a@hunter2@bucket/run",
        "s3://user:hunter2/@bucket/run",
        "user:hunter2@host",
        "user:hunter2@host:/run",
        "sftp://user:hunter2@host:22/run",
        "simplecache::s3://user:hunter2@bucket/run",
        "https://h/c?X-Amz-Signature=hunter2&X-Amz-Date=1",
        "https://h/c?X-Amz-Credential=hunter2",
        "https://h/c?sas=hunter2",
        "https://h/c?account_key=hunter2",
        "https://h/c?pw=hunter2",
        "https://h/c?a=1;k=hunter2",
        "https://h/c#access=hunter2",
        "https://h/c?code=hunter2==",
        "az://c/p?sv=2020&se=2027&sr=c&sp=rwl&sig=hunter2%3D",
        "https://hunter2@host/repository",
        "git+https://hunter2@host/repository",
        "https://h/p;token=hunter2",
        "http://u:p%40hunter2@h",
        "s3://b/p?AWSAccessKeyId=hunter2",
        "https://h/?a?token=hunter2",
    ],
)
def test_no_secret_of_a_url_is_shown(url: str) -> None:
    assert "hunter2" not in masked_url(url)
    assert "hunter2" not in shown(url)
    assert "hunter2" not in shown([1, url])


@pytest.mark.parametrize("part", ["://", "://:", "?", "a?", "@", ":@", "--", "=", "&=", "://a@"])
def test_a_long_value_is_masked_at_once(part: str) -> None:
    began = time.monotonic()
    masked_url(part * 20_000)
    masked_arguments("train.py", [part * 20_000])
    assert time.monotonic() - began < 2.0


@given(url=_PARTS.map("".join), arguments=st.lists(_PARTS.map("".join), max_size=4))
def test_no_text_between_separators_keeps_a_password(url: str, arguments: list[str]) -> None:
    masked_arguments("train.py", arguments)
    shown = masked_url(f"s3://user:hunter2@{url.replace('hunter2', '')}")
    assert "hunter2" not in shown


def test_a_refused_value_does_not_show_the_password_in_it() -> None:
    """etcd's user and password have settings of their own, and many write them into the URL."""
    given = {"ELASTIC_ETCD": "http://root:hunter2@etcd-1:2379"}
    with pytest.raises(ConfigurationError, match=r"http://\*\*\*@etcd-1:2379") as raised:
        load_settings(NodeSettings, {}, given, None, lambda: DeviceCounts(1, 1))
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("--lr 1e-3 --epochs 10 --fp16", "--lr 1e-3 --epochs 10 --fp16"),
        ("--lr=0.1 -n 3 model.depth=12 +trainer.gpus=2", "--lr=0.1 -n 3 model.depth=12 "
         "+trainer.gpus=2"),
        ("--model gpt2 data", "--model *** ***"),
        ("--pin 1234 --password=123456 -1", "--pin *** --password=*** -1"),
    ],
)  # fmt: skip
def test_names_and_numbers_of_arguments_are_shown(arguments: str, shown: str) -> None:
    assert masked_arguments("train.py", arguments.split()) == ["train.py", *shown.split()]


ARGUMENTS = [
    ["--api-key", "hunter2"],
    ["--wandb-token=hunter2"],
    ["db.password=hunter2"],
    ["WANDB_API_KEY=a=hunter2"],
    ["--data", "s3://k:hunter2@b/d"],
    ["--hf", "hf_hunter2"],
    ["--wandb-key", "hunter2"],
    ["--auth", "hunter2"],
    ["--pass", "hunter2"],
    ["--tokens", "hunter2"],
    ["--password", "-hunter2"],
    ["--password", "--hunter2="],
    ["--password", "-x=hunter2"],
    ["+token=hunter2"],
    ["++a.token=hunter2"],
    ["--header", "Authorization: Bearer hunter2"],
    ["-H", "Authorization:hunter2"],
    ["hunter2@host"],
    ["u:hunter2@host"],
    ["-phunter2"],
    ["-p=hunter2"],
    ["--url=https://h/c?sas=hunter2"],
    ['{"token": "hunter2"}'],
    ["--config", '{"a": "hunter2"}'],
    ["--env", "A=hunter2"],
    ["hunter2"],
    ["--", "hunter2"],
    ["--conf=a=b,c=hunter2"],
    ["--x", "eyJhunter2.eyJ"],
    ["--my\nhunter2"],
    ["--hf", "+hunter2"],
    ["--hf", "~hunter2"],
    ["-Dtoken=hunter2"],
    ["--conf", "-Dtoken=hunter2"],
    ["--set", "x.y=hunter2"],
    ["--proxy=http://u:hunter2@h:1"],
    ["--cookie", "a=1; b=hunter2"],
    ["@hunter2"],
    ["--ids", "1,hunter2"],
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=" ".join)
def test_no_secret_of_an_argument_is_shown(arguments: list[str]) -> None:
    shown = masked_arguments("train.py", arguments)
    assert "hunter2" not in " ".join(shown)
