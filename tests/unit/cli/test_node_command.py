"""The digest of a node's command, which shows whether agents run the same command."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from elastic.cli import agent
from elastic.cli.agent import NodeCommand
from elastic.settings.node import NodeSettings
from elastic.settings.shared import Launch
from elastic.settings.store import StoreSettings

SETTINGS = NodeSettings(launch=Launch.ELASTIC, store=StoreSettings(etcd=("127.0.0.1:2379",)))
ARGV = ["train", "--lr", "0.1"]


def test_a_module_and_a_script_of_the_same_name_have_different_digests() -> None:
    script = NodeCommand(settings=SETTINGS, argv=ARGV)
    module = NodeCommand(settings=dataclasses.replace(SETTINGS, module=True), argv=ARGV)
    assert script.digest != module.digest
    assert (script.text, module.text) == ("train --lr 0.1", "-m train --lr 0.1")
    argument = NodeCommand(settings=SETTINGS, argv=["-m", *ARGV])
    assert argument.digest != module.digest


def test_the_digest_of_a_script_is_that_of_older_versions() -> None:
    """Agents of both versions meet while a job is upgraded."""
    assert NodeCommand(settings=SETTINGS, argv=ARGV).digest == "830c111061191ab9f57217d5ee8d2954"


def test_the_script_is_examined_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examining a whole package takes seconds, and all statements about a command must agree."""
    looks: list[str] = []
    monkeypatch.setattr(agent, "is_classic", lambda program, *_, **__: not looks.append(program))
    program = str(tmp_path / "train.py")
    command = NodeCommand(settings=SETTINGS, argv=[program])
    assert command.classic
    assert command.text.startswith("--launch torchrun")
    assert command.digest
    assert looks == [program]
