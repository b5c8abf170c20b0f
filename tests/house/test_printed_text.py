"""Commands print text from outside only through the function that makes it printable."""

from __future__ import annotations

import ast
from pathlib import Path

CLI = Path(__file__).parent.parent.parent / "elastic" / "cli"


def _raw_prints(source: str) -> list[str]:
    """Calls of print() with more than literal text, JSON or printable text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and node.args):
            continue
        argument = node.args[0]
        called = ast.unparse(argument.func) if isinstance(argument, ast.Call) else ""
        if called not in ("printable", "json.dumps") and not isinstance(argument, ast.Constant):
            found.append(ast.unparse(node))
    return found


def test_commands_print_only_printable_text() -> None:
    raw = {p.name: _raw_prints(p.read_text()) for p in sorted(CLI.glob("*.py"))}
    assert {name: prints for name, prints in raw.items() if prints} == {
        "main.py": [
            "print(f'elastic {__version__}')",
            "print(f'elastic: -m needs the name of a module: elastic {command} [options] -m "
            "MODULE [arguments]', file=sys.stderr)",
        ],
        "operator.py": ["print(text)"],  # JSON
    }


def test_a_raw_print_is_found() -> None:
    assert _raw_prints("print(error)") == ["print(error)"]
