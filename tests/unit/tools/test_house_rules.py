"""Each rule of the house can fail; `make check` holds the tree to them."""

import json
from pathlib import Path

import pytest
from check_prose import check as check_prose
from check_safety import check_safety
from check_sizes import BUDGETS, check_budgets, check_sizes, package_sizes

from support.launchers import run_python

MODULE = Path("gradsync/sync/sample.py")
TORCH = "private: torch."
NET = "from torch import nn\nclass Net(nn.Module):\n    def f(self):\n        "


def lines(count: int) -> str:
    return "    x = 1\n" * count


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n" * 601, ["sample.py:1 file 601 > 600"]),
        ("x = 1\n" * 600, []),
        ("\ndef long():\n" + lines(80), ["sample.py:2 long 81 > 80"]),
        ("async def long():\n" + lines(80), ["sample.py:1 long 81 > 80"]),
        ("def fits():\n" + lines(79), []),
    ],
)
def test_each_size_limit(text: str, expected: list[str]) -> None:
    assert check_sizes(Path("sample.py"), text) == expected


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import os\nx = os.environ['RANK']", "os.environ"),
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle.loads"),
        ("x = eval('1')", "eval"),
        ("import torch\ntorch.load('f')", "torch.load without weights_only=True"),
        ("subprocess.run('ls', shell=True)", "shell=True"),
        ("np.load('f', allow_pickle=True)", "allow_pickle=True"),
        ("os.system('ls')", "os.system"),
        ("yaml.load(f, Loader=yaml.Loader)", "yaml.load"),
        ("dist.broadcast_object_list([1])", "dist.broadcast_object_list"),
        ("def f():\n    global count\n    count = 1", "global count"),
        ("import torch\ntorch._foreach_add_(a, b)", "private: torch._foreach_add_"),
        ("from torch._dynamo import config", TORCH + "_dynamo.config"),
        ("import torch._inductor", TORCH + "_inductor"),
        ("getattr(mesh, '_pg_registry', {})", "private: getattr(mesh, '_pg_registry', {})"),
        (f"{NET}self._apply(f)", "private: self._apply"),
    ],
)
def test_each_safety_rule(text: str, what: str) -> None:
    found = check_safety(MODULE, text)
    assert [line.split(" ", 1)[1] for line in found] == [what]
    assert found[0].startswith(f"{MODULE}:")


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "torch.load('f', weights_only=True)",
        "subprocess.run(['ls'], shell=False)",
        "yaml.safe_load(f)",
        "import os\nos.path.join('a', 'b')",
        "load('f')",
        "class A:\n    def _f(self): ...\ndef g(a):\n    a._f()",
        "class A(Base):\n    def f(self):\n        self._of_base()",
        f"{NET}self._own = 1\n        self._own += 1",
        "os._exit(1)",
    ],
)
def test_safe_code_passes(text: str) -> None:
    assert check_safety(MODULE, text) == []


# -- importing does nothing -----------------------------------------------------------------------

LOOK = """
import json, logging, os, random, signal, sys, threading, warnings

def look():
    return {
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "loggers": sorted(logging.root.manager.loggerDict),
        "handlers": [str(handler) for handler in logging.root.handlers],
        "random": hash(random.getstate()),
        "warnings": [str(entry) for entry in warnings.filters],
        "signals": {str(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "path": list(sys.path),
        "streams": [id(sys.stdout), id(sys.stderr), id(sys.excepthook)],
        "folder": os.getcwd(),
    }

changed = {}
for module in ("gradsync.errors", "gradsync.world", "gradsync.runtime.environ", "gradsync"):
    before = look()
    __import__(module)
    after = look()
    changed |= {name: [module, before[name], after[name]] for name in before
                if before[name] != after[name]}
print(json.dumps({"changed": changed, "torch": "torch" in sys.modules}))
"""


def test_importing_changes_nothing_and_needs_no_torch() -> None:
    said = json.loads(run_python(["-c", LOOK]).ok().stdout)
    assert said == {"changed": {}, "torch": False}


def test_each_package_keeps_to_its_budget() -> None:
    sizes = package_sizes()
    assert sizes.keys() == BUDGETS.keys()
    assert check_budgets(sizes) == []
    assert check_budgets({"sync": BUDGETS["sync"] + 1, "new": 1}) == [
        f"gradsync/sync {BUDGETS['sync'] + 1} lines > {BUDGETS['sync']}",
        "gradsync/new 1 lines > 0",
    ]


def test_turns_of_phrase_are_found_in_prose_only(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text('"""It has gone."""\n\nanew = "nobody"  # beside it\n')
    page = tmp_path / "page.md"
    page.write_text("Such a page.\n```\nnobody\n```\n")
    words, found = check_prose([code, page])
    assert words == 3 + 3 + 3
    assert [line.rpartition(": ")[2] for line in found] == ["'has gone'", "'beside'", "'Such a'"]
