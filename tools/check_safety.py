"""What the library never does, found in its syntax trees.

    python tools/check_safety.py [FOLDER …]        (default: src)

Nothing that runs code from a file or a socket (pickle in any dress, eval, exec), no shell, no state
in module globals, and the environment is read in one module only. Prints `path:line what` for each
offence and exits with 1.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from source_tree import run

ENVIRONMENT_MODULE = "runtime/environ.py"
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {
    *("eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.full_load", "yaml.unsafe_load"),
}
UNSAFE_FLAGS = {"shell", "allow_pickle"}
OBJECT_COLLECTIVE = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?$")
"""torch.distributed's collectives that pickle."""


def check_safety(path: Path, text: str) -> list[str]:
    """The offences in one file."""
    may_read_environment = path.as_posix().endswith(ENVIRONMENT_MODULE)
    found = set()
    for node in ast.walk(ast.parse(text, filename=str(path))):
        for what in _offences(node):
            if not (may_read_environment and what in ENVIRONMENT):
                found.add((getattr(node, "lineno", 1), what))
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


if __name__ == "__main__":
    raise SystemExit(run(check_safety, ["src"]))
