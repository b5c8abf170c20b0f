"""Writes docs/SETTINGS.md: `python -m tests.settings_doc`; the freshness test uses it too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from elastic.cli.main import app
from elastic.settings.commands import COMMANDS, Command, options_by_name
from elastic.settings.fields import Option
from elastic.settings.operator import OperatorSettings

TARGET = Path(__file__).parent.parent / "docs" / "SETTINGS.md"
_HEAD = """\
# Settings

Generated from `elastic/settings` by `python -m tests.settings_doc`.

The first source in this list wins:

1. an option of the command: `--max-restarts 5`
2. an environment variable: `ELASTIC_MAX_RESTARTS=5`
3. the command's own table of the TOML file given with `--config` (or `ELASTIC_CONFIG`)
4. the table `[job]` of that file, which every command reads
5. the default

A key of the file is the option's name with underscores: `max_restarts = 5`. One file and one
environment serve all commands: each command takes what it knows from `[job]` and the variables.
`elastic doctor`, which checks a node, also takes what it knows from `[agent]`; `[doctor]` wins.
`elastic torchrun` has torchrun's options, and takes what these do not decide from where
`elastic run` takes it.

```toml
[job]
job = "digits"
etcd = ["http://10.0.0.1:2379", "http://10.0.0.2:2379", "http://10.0.0.3:2379"]
checkpoint_dir = "/shared/digits"
script = "/shared/train.py"
args = ["--lr", "0.1"]

[coordinator]
min_workers = 2

[agent]
nproc_per_node = "gpu"
```

A yes or no is `--insecure` or `--no-insecure` on the command line, `true` or `false` elsewhere.
Commas separate the items of a list; the file also takes arrays.

The script and its arguments follow the options on the command line, and are settings like the
others: if the command line has none, `ELASTIC_SCRIPT` and `ELASTIC_ARGS` count, or `script` and
`args` of the file. Quote the variable as for a shell: `ELASTIC_ARGS="--lr 0.1 --name 'a b'"`.
Each of the two counts by itself: a script on the command line without arguments gets those of the
environment. With `--module` (`-m`) the script is the name of a module, wherever you give it.
"""
_COLUMNS = "| option | variable | default | |\n|---|---|---|---|\n"


def text() -> str:
    return "".join([_HEAD, *map(_command, COMMANDS), *_groups()])


def _command(command: Command) -> str:
    options = options_by_name(command).values()
    title = _operators() if command.settings is OperatorSettings else command.title
    groups = dict.fromkeys(option.group for option in options if option.group)
    links = " and ".join(f"[{group}](#{group.lower()})" for group in groups)
    more = f"\nBesides these, those of {links}.\n" if links else ""
    table = f"Table `[{command.table}]`.\n{more}"
    own = _rows(option for option in options if not option.group)
    return f"\n## {title[0].upper() + title[1:]}\n\n{table}\n{_COLUMNS}{own}"


def _operators() -> str:
    names = [
        one.name or one.callback.__name__
        for one in app.registered_commands
        if one.callback and {"timeout_s", "etcd"} <= {*inspect.signature(one.callback).parameters}
    ]
    return f"operator commands: `elastic {'`, `'.join(names)}`"


def _groups() -> Iterator[str]:
    shared: dict[str, dict[str, Option]] = {}
    for command in COMMANDS:
        for name, option in options_by_name(command).items():
            if option.group:
                shared.setdefault(option.group, {})[name] = option
    for group, options in shared.items():
        yield f"\n## {group}\n\n{_COLUMNS}{_rows(iter(options.values()))}"


def _rows(options: Iterator[Option]) -> str:
    return "".join(map(_row, options))


def _row(option: Option) -> str:
    flag = "" if option.secret else f"`{option.flag}`"
    if option.short:
        flag = f"`{option.short}`, {flag}"
    if option.required:
        default = "required"
    else:
        default = "unset" if option.default is None else f"`{option.shown_default}`"
    return f"| {flag} | `{option.variable}` | {default} | {option.help} |\n"


if __name__ == "__main__":
    TARGET.write_text(text())
