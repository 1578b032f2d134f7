"""Calls and names that the library must not use, found in its syntax trees.

    python tools/check_safety.py [FOLDER …]        (default: src)

Nothing that runs code from a file or a socket (pickle in any dress, eval, exec), no shell, no state
in module globals; the environment is read in one module only, and one module only touches names
that are private to torch. Prints `path:line what` for each offence and exits with 1.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from source_tree import run

ENVIRONMENT_MODULE = "runtime/environ.py"
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
PRIVATE_MODULE = "core/torch_private.py"
_NAMED_TUPLE = ("_asdict", "_fields", "_make", "_replace")
"""Public, with an underscore so that no field can have such a name."""
NOT_OF_TORCH = {
    # Documented, in spite of the underscore.
    *("_exit", "_getframe", "_current_frames", "_fields", "_replace"),
    *("_distributed", "_ex_iterable"),  # of `datasets`
    "_reset_state",  # of accelerate
    "_transport",  # of our engine, which a benchmark looks into
}
"""Private names that a file may touch though it does not define them."""
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {
    *("eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.full_load", "yaml.unsafe_load")
}
UNSAFE_FLAGS = {"shell", "allow_pickle"}
OBJECT_COLLECTIVE = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?$")
"""torch.distributed's collectives that pickle."""


def check_safety(path: Path, text: str) -> list[str]:
    """The offences in one file."""
    may_read_environment = path.as_posix().endswith(ENVIRONMENT_MODULE)
    tree = ast.parse(text, filename=str(path))
    found = set()
    allowed = ENVIRONMENT if may_read_environment else set()
    for node in ast.walk(tree):
        for what in _offences(node):
            if what not in allowed:
                found.add((getattr(node, "lineno", 1), what))
    if not path.as_posix().endswith(PRIVATE_MODULE):
        found |= set(_private_names(tree))
    return [f"{path}:{line} {what}" for line, what in sorted(found)]


def _offences(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from _imported(node)
    elif isinstance(node, ast.Global):
        yield f"global {', '.join(node.names)}"
    elif isinstance(node, ast.Attribute | ast.Name):
        name = ast.unparse(node)
        if name in ENVIRONMENT or OBJECT_COLLECTIVE.search(name):
            yield name
    elif isinstance(node, ast.Call):
        yield from _called(node)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        name = f"{module}.{alias.name}" if module else alias.name
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"import {name}"
        elif name in ENVIRONMENT or name in UNSAFE_CALLS or OBJECT_COLLECTIVE.search(name):
            yield name


def _called(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    flags = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if name in UNSAFE_CALLS:
        yield name
    if name == "torch.load" and flags.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    for flag in UNSAFE_FLAGS & flags.keys():
        if flags[flag] != "False":
            yield f"{flag}={flags[flag]}"


def _private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names that the file does not define, where they may be torch's: imported from it, of
    any object but `self`, and of `self` in a class that derives from one of torch's."""
    nodes = list(ast.walk(tree))
    own = NOT_OF_TORCH | {name for node in nodes for name in _defined(node)}
    in_torch = {
        inner for node in nodes if _derives_from_torch(node, nodes) for inner in ast.walk(node)
    }
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for name in (f"{module}.{alias.name}".lstrip(".") for alias in node.names):
                if name.startswith("torch.") and any(map(_is_private, name.split("."))):
                    yield node.lineno, f"private: {name}"
        elif isinstance(node, ast.Attribute | ast.Call):
            holder, name = _asked_for(node)
            if _is_private(name) and name not in own and (holder != "self" or node in in_torch):
                yield node.lineno, f"private: {ast.unparse(node)}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _NAMED_TUPLE


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield from [node.attr] if ast.unparse(node.value) == "self" else []


def _asked_for(node: ast.Attribute | ast.Call) -> tuple[str, str]:
    """(x, name) of `x.name` and of `getattr(x, "name")`."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node.value), node.attr
    asks = ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr", "attrgetter")
    words = [word.value for word in node.args if isinstance(word, ast.Constant)] if asks else []
    name = next((word for word in words if isinstance(word, str)), "")
    return ast.unparse(node.args[0]) if name else "", name


def _derives_from_torch(node: ast.AST, nodes: list[ast.AST]) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    imports = [line for line in nodes if isinstance(line, ast.Import | ast.ImportFrom)]
    of_torch = {
        (alias.asname or alias.name).split(".")[0]
        for line in imports
        for alias in line.names
        if (getattr(line, "module", None) or alias.name).split(".")[0] == "torch"
    }
    return any(ast.unparse(base).split(".")[0] in of_torch for base in node.bases)


if __name__ == "__main__":
    raise SystemExit(run(check_safety, ["src"]))
