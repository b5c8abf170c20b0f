"""Notes which places of elastic.core a history reaches, and which values it finds there.

The source is compiled with probes before each statement of a function, and around each condition,
operand and result. These note whether the value is true, that is, neither zero nor empty. Probes do
not change what the source does.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.util import decode_source
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

_PACKAGE = "elastic.core"
_COME, _FOUND = "__come__", "__found__"


class Place(NamedTuple):
    """A statement, or a value in one, by its lines."""

    file: str
    """Below elastic/core."""
    first: int
    last: int


class Probes:
    """Makes elastic.core import with probes. Raises RuntimeError if a part of it is imported."""

    def __init__(self) -> None:
        if any(name.startswith(_PACKAGE) for name in sys.modules):
            raise RuntimeError(f"{_PACKAGE} is imported already")
        self.places: list[Place] = []
        self.seen: set[int] = set()
        """For each place reached: twice its number, plus one where its value was true."""
        sys.meta_path.insert(0, _Finder(self))

    def compiled(self, source: str, path: str, file: str) -> CodeType:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                _Weaver(self, file).weave(node)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def provide(self, module: ModuleType) -> None:
        add = self.seen.add

        def found(number: int, value: object) -> object:
            add(number + 1 if value else number)
            return value

        vars(module)[_COME], vars(module)[_FOUND] = add, found

    def place(self, file: str, first: int, last: int) -> int:
        self.places.append(Place(file, first, last))
        return 2 * (len(self.places) - 1)


class _Weaver(ast.NodeTransformer):
    """Puts probes into a function and all functions inside it."""

    def __init__(self, probes: Probes, file: str) -> None:
        self._probes, self._file = probes, file

    def weave(self, function: ast.FunctionDef) -> None:
        if not getattr(function, "woven", False):
            self.visit(function)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.woven = True  # type: ignore[attr-defined]
        docstring = node.body[:1] if ast.get_docstring(node, clean=False) is not None else []
        node.body = node.body[len(docstring) :]
        self.generic_visit(node)
        node.body = [*docstring, *node.body] or [ast.Pass()]
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        before = {f: list(getattr(node, f)) for f in _BLOCKS if _is_block(node, f)}
        super().generic_visit(node)
        for name, statements in before.items():
            setattr(node, name, [s for known in statements for s in (self._come(known), known)])
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        node.values = [self._found(v) for v in node.values]
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        return self._found(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        node.left, node.right = self._found(node.left), self._found(node.right)
        return self._found(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = self._found(node.value)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None:
            node.value = self._found(node.value)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        return self._tested(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._tested(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self._tested(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.ifs = [self._found(test) for test in node.ifs]
        return node

    def _tested(self, node: ast.If | ast.While | ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        node.test = self._found(node.test)
        return node

    def _come(self, statement: ast.stmt) -> ast.stmt:
        last = statement.end_lineno or statement.lineno
        if body := getattr(statement, "body", None) or getattr(statement, "cases", None):
            inner = body[0]
            first_inner = getattr(inner, "lineno", None) or inner.pattern.lineno
            last = max(statement.lineno, first_inner - 1)
        number = self._probes.place(self._file, statement.lineno, last)
        call = ast.Call(ast.Name(_COME, ast.Load()), [ast.Constant(number)], [])
        return ast.copy_location(ast.Expr(call), statement)

    def _found(self, test: ast.expr) -> ast.expr:
        if (
            isinstance(test, ast.Call)
            and isinstance(test.func, ast.Name)
            and test.func.id == _FOUND
        ):
            return test
        last = test.end_lineno or test.lineno
        number = self._probes.place(self._file, test.lineno, last)
        name = ast.Name(_FOUND, ast.Load())
        return ast.copy_location(ast.Call(name, [ast.Constant(number), test], []), test)


_BLOCKS = ("body", "orelse", "finalbody")


def _is_block(node: ast.AST, name: str) -> bool:
    block = getattr(node, name, None)
    return isinstance(block, list) and bool(block) and isinstance(block[0], ast.stmt)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, probes: Probes) -> None:
        self._probes = probes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del target
        if not name.startswith(_PACKAGE):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(self._probes, spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, probes: Probes, name: str, path: str) -> None:
        super().__init__(name, path)
        self._probes = probes

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        _, _, file = path.rpartition("/elastic/core/")
        return self._probes.compiled(decode_source(Path(path).read_bytes()), path, file)

    def exec_module(self, module: ModuleType) -> None:
        self._probes.provide(module)
        super().exec_module(module)
