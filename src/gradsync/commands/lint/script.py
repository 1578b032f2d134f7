"""Facts about a training script, read from its text: nothing is imported or run.

Names are followed through plain assignments, by name within the file. That is enough for common
scripts; in other cases a rule reports nothing.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from gradsync.errors import ConfigError

_MAIN = ("is_main_process", "is_main", "is_master", "master_process", "is_global_zero", "is_rank_0")
_MAIN += ("is_local_main_process", "rank_zero", "is_rank_zero", "main_process")
_WRAPPERS = ("DistributedDataParallel", "DDP")
_HINTS = ("torch.distributed", "DistributedDataParallel", "init_process_group", "LOCAL_RANK")


def dotted(node: ast.AST | None) -> str:
    """`a.b.c` of a chain of names, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def last(node: ast.AST | None) -> str:
    """The last name of a chain: `c` of `a.b.c` and of `f(x).c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a call's keyword argument, None without it."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def is_constant(node: ast.expr | None, *, value: bool) -> bool:
    """Whether it is the constant True, or False."""
    return isinstance(node, ast.Constant) and node.value is value


def owner(call: ast.Call) -> str:
    """`a.b` of a call `a.b.c()`."""
    return dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def calls_in(node: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Calls in a node of functions or methods with one of these last names, or with any name."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and (not names or last(each.func) in names):
            yield each


def _mentions(node: ast.AST, text: str) -> bool:
    return any(isinstance(each, ast.Constant) and each.value == text for each in ast.walk(node))


def _is_value(node: ast.AST, variable: str, call: str) -> bool:
    """Whether it is `call()`, or the environment's `variable`, also as an int."""
    if isinstance(node, ast.Call) and last(node.func) == "int" and node.args:
        node = node.args[0]
    if isinstance(node, ast.Call) and last(node.func) == call:
        return True
    of_environment = isinstance(node, ast.Subscript | ast.Call) and "environ" in ast.dump(node)
    return of_environment and _mentions(node, variable)


class Script:
    """A parsed script: `text`, and its `path` for messages; ConfigError if it is not Python."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.lines = text.split("\n")  # as Python counts them: not at form feeds
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None) or 0
            said = getattr(error, "msg", None) or type(error).__name__
            raise ConfigError(f"{path}:{line}: not Python: {said}") from None
        self._parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        todo: list[ast.AST] = [self.tree]
        while todo:  # depth first, in the order of the text
            node = todo.pop()
            self.nodes.append(node)
            children = list(ast.iter_child_nodes(node))
            self._parents.update(dict.fromkeys(children, node))
            todo += reversed(children)
        self.is_distributed = any(hint in text for hint in _HINTS)
        self.values = self._assigned()
        """All expressions assigned to a name anywhere."""
        self.ranks = self._names_of("RANK", "get_rank")
        """Names of the global rank."""
        self.world_sizes = self._names_of("WORLD_SIZE", "get_world_size")
        """Names of the number of ranks."""
        self.wrapped = {
            name
            for name, values in self.values.items()
            if any(isinstance(v, ast.Call) and last(v.func) in _WRAPPERS for v in values)
        }
        """Names of models wrapped in torch's DDP."""

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Calls of functions or methods with one of these last names, in order."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and last(node.func) in names:
                yield node

    def parents(self, node: ast.AST) -> Iterator[ast.AST]:
        """Nodes around a node, from the inside out."""
        while (above := self._parents.get(node)) is not None:
            yield above
            node = above

    def function_of(self, node: ast.AST) -> ast.AST:
        """The function a node is in, or the module."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        return next((each for each in self.parents(node) if isinstance(each, kinds)), self.tree)

    def blocks(self, node: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
        """The lists of statements around a node, innermost first, with its index in each."""
        for above in self.parents(node):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(above, name, None)
                if isinstance(block, list) and node in block:
                    yield block, block.index(node)
            node = above

    # -- names ------------------------------------------------------------------------------------

    def _assigned(self) -> dict[str, list[ast.expr]]:
        found: dict[str, list[ast.expr]] = defaultdict(list)

        def take(target: ast.expr, value: ast.expr) -> None:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for each, part in zip(target.elts, value.elts, strict=False):
                    take(each, part)
            elif name := dotted(target):
                found[name].append(value)

        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    take(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                take(node.target, node.value)
        return found

    def _names_of(self, variable: str, call: str) -> set[str]:
        """Names of an environment variable or a call's result; not of a remainder of it, as a
        local rank is."""
        found = {
            name
            for name, values in self.values.items()
            for value in values
            if (_mentions(value, variable) or any(calls_in(value, call)))
            and not any(isinstance(each, ast.Mod) for each in ast.walk(value))
        }
        while more := {  # copies of copies
            name
            for name, values in self.values.items()
            if name not in found and any(dotted(value) in found for value in values)
        }:
            found |= more
        return found

    def is_rank(self, node: ast.AST) -> bool:
        """Whether an expression is the global rank."""
        named = dotted(node) in self.ranks and not self._is_parameter(node)
        return named or _is_value(node, "RANK", "get_rank")

    def is_world_size(self, node: ast.AST) -> bool:
        """Whether an expression is the number of ranks."""
        return dotted(node) in self.world_sizes or _is_value(node, "WORLD_SIZE", "get_world_size")

    def _is_parameter(self, node: ast.AST) -> bool:
        """Whether a name is a parameter of an enclosing function, whatever its callers pass."""
        name = dotted(node)
        return any(
            name in (each.arg for each in ast.walk(above.args) if isinstance(each, ast.arg))
            for above in self.parents(node)
            if isinstance(above, ast.FunctionDef | ast.Lambda)
        )

    # -- rank 0 only ------------------------------------------------------------------------------

    def _chooses(self, test: ast.AST, names: tuple[str, ...] = ()) -> Literal["one", "others", ""]:
        """Whether a condition is true on one rank alone, on all ranks but one, or neither; `names`
        were followed."""
        if isinstance(test, ast.BoolOp):
            ways = [self._chooses(each, names) == "one" for each in test.values]
            is_one = any(ways) if isinstance(test.op, ast.And) else all(ways)
            return "one" if is_one else ""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            opposite: dict[str, Literal["one", "others", ""]] = {"one": "others", "others": "one"}
            return opposite.get(self._chooses(test.operand, names), "")
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            sides = (test.left, test.comparators[0])
            named = any(self.is_rank(s) or last(s) in ("rank", "local_rank") for s in sides)
            if named and isinstance(test.ops[0], ast.Eq):
                return "one" if any(isinstance(side, ast.Constant) for side in sides) else ""
            return "others" if named and isinstance(test.ops[0], ast.NotEq | ast.Gt) else ""
        if self.is_rank(test):
            return "others"
        name = last(test.func if isinstance(test, ast.Call) else test)
        said = [v for v in self.values[name] if isinstance(v, ast.Compare | ast.BoolOp)]
        is_one = name not in names and any(
            self._chooses(value, (*names, name)) == "one" for value in said
        )
        return "one" if name in _MAIN or is_one else ""

    def on_one_rank(self, node: ast.AST) -> bool:
        """Whether only one rank reaches a statement, judging by its function."""
        here = node
        for above in self.parents(node):
            if isinstance(above, ast.If | ast.IfExp):
                body = above.body if isinstance(above.body, list) else [above.body]
                inside = here in body
                side = "one" if inside else "others"
                if here is not above.test and self._chooses(above.test) == side:
                    return True
            if isinstance(above, ast.FunctionDef):
                named = [
                    last(d.func if isinstance(d, ast.Call) else d) for d in above.decorator_list
                ]
                if "rank_zero_only" in named or "on_main_process" in named:
                    return True
                break
            here = above
        return any(
            isinstance(earlier, ast.If)
            and self._chooses(earlier.test) == "others"
            and isinstance(earlier.body[-1], ast.Return | ast.Continue | ast.Raise)
            for block, place in self.blocks(node)
            for earlier in block[:place]
        )

    def on_some_ranks(self, call: ast.Call) -> bool:
        """Whether a condition on the rank encloses a call that its other branch does not make."""
        here: ast.AST = call
        for above in self.parents(call):
            if isinstance(above, ast.FunctionDef):
                return False
            if isinstance(above, ast.If) and here is not above.test and self._chooses(above.test):
                sides, name = (above.body, above.orelse), last(call.func)
                return not all(any(any(calls_in(each, name)) for each in side) for side in sides)
            here = above
        return False
