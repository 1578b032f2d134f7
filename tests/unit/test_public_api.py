"""The promises of `import gradsync`: every name is there, explained, and listed once."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import gradsync
from gradsync import compat

ROOT = Path(gradsync.__file__).parent
MODULES = sorted(
    path
    for path in ROOT.rglob("*.py")
    if path.name == "__init__.py" or not path.name.startswith("_")
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_no_name_twice() -> None:
    assert len(gradsync.__all__) == len(set(gradsync.__all__))


@pytest.mark.parametrize("name", gradsync.__all__)
def test_every_name_resolves_and_is_explained(name: str) -> None:
    value = getattr(gradsync, name)
    if name == "__version__":
        assert isinstance(value, str)
        return
    assert value.__module__ == gradsync._HOME_OF[name]
    assert getattr(import_module(value.__module__), name) is value
    assert inspect.getdoc(value)
    # A subclass would show its parent's words, a dataclass its signature.
    assert not value.__doc__.startswith(f"{name}("), "no docstring of its own"


def test_the_reference_has_every_name() -> None:
    """Each once, those of `compat` too; and what `gs.replicate` and the loaders return."""
    page = (ROOT.parents[1] / "docs" / "reference.md").read_text()
    listed = re.findall(r"^\.\. auto\w+:: ([\w.]+)\.(\w+)$", page, re.MULTILINE)
    values = [getattr(import_module(module), name) for module, name in listed]
    assert len(set(values)) == len(values)
    promised = {getattr(gradsync, name) for name in gradsync.__all__ if name != "__version__"}
    promised |= {getattr(compat, name) for name in compat.__all__}
    assert promised <= set(values)
    assert {v.__name__ for v in set(values) - promised} == {
        *("GradientSync", "StepResult", "Batch", "MicroBatch")
    }


def test_the_listing_is_the_promise() -> None:
    assert sorted(dir(gradsync)) == sorted(gradsync.__all__)


def test_names_of_other_guides_are_found_though_not_listed() -> None:
    assert all(getattr(gradsync, name) is getattr(compat, name) for name in compat.__all__)
    assert not set(compat.__all__) & set(gradsync.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ini'"):
        _ = gradsync.ini
    assert not hasattr(gradsync, "torch")


def test_star_import_brings_exactly_them() -> None:
    namespace: dict[str, Any] = {}
    exec("from gradsync import *", namespace)  # noqa: S102  the only way to test it
    assert set(namespace) - {"__builtins__"} == set(gradsync.__all__)


def test_type_checkers_see_the_same_names() -> None:
    """The imports under TYPE_CHECKING and the table of homes are one list, written twice."""
    (block,) = (
        node
        for node in parse(ROOT / "__init__.py").body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        for alias in node.names:
            assert alias.asname == alias.name, "`import x as x` marks a re-export"
            seen[alias.name] = node.module or ""
    assert seen == gradsync._HOME_OF
    assert sum(map(len, gradsync._HOMES.values())) == len(seen)


# -- docstrings -----------------------------------------------------------------------------------


def public(node: ast.Module | ast.ClassDef, where: str) -> Iterator[tuple[str, Definition]]:
    """Public functions and classes of a module, and the public methods of those classes."""
    for child in node.body:
        if not isinstance(child, Definition):
            continue
        if child.name.startswith("_"):
            continue
        yield f"{where}:{child.lineno} {child.name}", child
        if isinstance(child, ast.ClassDef):
            yield from public(child, where)


def without_docstring(tree: ast.Module, where: str) -> list[str]:
    """A method takes over the words of the one that it overrides, see `inspect.getdoc`."""
    bare = [name for name, node in public(tree, where) if not ast.get_docstring(node)]
    return [name for name in bare if not _inherits_words(tree, where, name)]


def _inherits_words(tree: ast.Module, where: str, name: str) -> bool:
    method = name.rpartition(" ")[2]
    line = int(name.rpartition(" ")[0].rpartition(":")[2])
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.bases and node.lineno < line <= node.end_lineno:
            module = import_module("gradsync." + where.removesuffix(".py").replace("/", "."))
            return bool(inspect.getdoc(getattr(getattr(module, node.name), method)))
    return False


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_public_is_explained(path: Path) -> None:
    tree = parse(path)
    assert without_docstring(tree, str(path.relative_to(ROOT))) == []
    if tree.body:
        assert ast.get_docstring(tree), "the module itself"


# -- words that lead to others --------------------------------------------------------------------


def described() -> Iterator[tuple[str, Any, str]]:
    """What the reference shows: each name, its owner, its docstring."""
    page = (ROOT.parents[1] / "docs" / "reference.md").read_text()
    for module, name in re.findall(r"^\.\. auto\w+:: ([\w.]+)\.(\w+)$", page, re.MULTILINE):
        value = getattr(import_module(module), name)
        yield name, value, inspect.getdoc(value) or ""
        if isinstance(value, type):
            for member, part in inspect.getmembers(value):
                if not member.startswith("_") and (callable(part) or isinstance(part, property)):
                    yield f"{name}.{member}", value, inspect.getdoc(part) or ""


def can_be_opened(name: str, owner: Any, text: str) -> bool:
    """Whether a reader finds it: a public name, a member or argument of the owner, torch's."""
    first, *rest = name.removeprefix("gs.").split(".")
    arguments = re.findall(r"^ {4}(\w+): ", text, re.MULTILINE)
    own = dir(owner) if isinstance(owner, type) else list(inspect.signature(owner).parameters)
    if first in ("gradsync", "torch", "nn", "dist"):
        return True
    if rest and hasattr(gradsync, first):
        return hasattr(getattr(gradsync, first), rest[0])
    return hasattr(gradsync, first) or (not rest and first in [*own, *arguments])


def test_docstrings_lead_to_names_that_a_user_can_open() -> None:
    wrong = []
    for where, owner, text in described():
        wrong += [f"{where}: {note}" for note in re.findall(r"\[Note: [^]]+\]", text)]
        names = re.findall(r"\b[Ss]ee `([\w.]+)`", text)
        names += re.findall(r"`([A-Z_]{4,}|[A-Z]\w+\.\w+)`", text)
        wrong += [f"{where}: {name}" for name in names if not can_be_opened(name, owner, text)]
    assert sorted(set(wrong)) == []
