"""The rules of the house hold on the tree, and each of them can fail."""

import json
import shutil
from pathlib import Path

import pytest
from check_safety import check_safety
from check_sizes import BUDGETS, check_budgets, check_sizes, package_sizes
from source_tree import REPOSITORY, findings

from support.launchers import Finished, clean_environment, run_command, run_python
from support.requirements import require

SOURCE = REPOSITORY / "src"
MODULE = Path("gradsync/sync/sample.py")
TORCH = "private: torch."
NET = "from torch import nn\nclass Net(nn.Module):\n    def f(self):\n        "


def test_sizes_of_the_tree() -> None:
    assert findings(check_sizes, [SOURCE, REPOSITORY / "tools"]) == []


def test_safety_of_the_tree() -> None:
    assert findings(check_safety, [SOURCE]) == []


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
        ("class Long:\n" + lines(250), ["sample.py:1 Long 251 > 250"]),
        ("class Fits:\n" + lines(249), []),
    ],
)
def test_each_size_limit(text: str, expected: list[str]) -> None:
    assert check_sizes(Path("sample.py"), text) == expected


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import os\nx = os.environ['RANK']", "os.environ"),
        ("import os\nx = os.getenv('RANK')", "os.getenv"),
        ("from os import environ", "os.environ"),
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle.loads"),
        ("x = eval('1')", "eval"),
        ("exec('x = 1')", "exec"),
        ("import torch\ntorch.load('f')", "torch.load without weights_only=True"),
        ("torch.load('f', weights_only=False)", "torch.load without weights_only=True"),
        ("subprocess.run('ls', shell=True)", "shell=True"),
        ("np.load('f', allow_pickle=True)", "allow_pickle=True"),
        ("os.system('ls')", "os.system"),
        ("yaml.load(f, Loader=yaml.Loader)", "yaml.load"),
        ("dist.broadcast_object_list([1])", "dist.broadcast_object_list"),
        ("dist.all_gather_object(a, b)", "dist.all_gather_object"),
        ("from torch.distributed import gather_object", "torch.distributed.gather_object"),
        ("def f():\n    global count\n    count = 1", "global count"),
        ("import torch\ntorch._foreach_add_(a, b)", "private: torch._foreach_add_"),
        (
            "from torch.nn.modules.batchnorm import _BatchNorm",
            TORCH + "nn.modules.batchnorm._BatchNorm",
        ),
        ("from torch._dynamo import config", TORCH + "_dynamo.config"),
        ("import torch._inductor", TORCH + "_inductor"),
        ("self.group._get_backend(device)", "private: self.group._get_backend"),
        ("getattr(mesh, '_pg_registry', {})", "private: getattr(mesh, '_pg_registry', {})"),
        (f"{NET}self._apply(f)", "private: self._apply"),
    ],
)
def test_each_safety_rule(text: str, what: str) -> None:
    found = check_safety(MODULE, text)
    assert [line.split(" ", 1)[1] for line in found] == [what]
    assert found[0].startswith(f"{MODULE}:")


def test_an_offence_has_its_line() -> None:
    assert check_safety(MODULE, "x = 1\n\nimport dill\n") == [f"{MODULE}:3 import dill"]


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


def test_one_module_may_read_the_environment() -> None:
    text = "import os\nx = os.environ['RANK']"
    assert check_safety(Path("src/gradsync/runtime/environ.py"), text) == []
    assert check_safety(Path("src/gradsync/runtime/other.py"), text) != []


def test_one_module_may_touch_private_names_of_torch() -> None:
    text = "import torch\nx = torch._foreach_add_"
    assert check_safety(Path("src/gradsync/core/torch_private.py"), text) == []
    assert check_safety(Path("src/gradsync/sync/torch_private.py"), text) != []


def test_the_command_prints_and_fails(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import pickle\n")
    done = run_python([REPOSITORY / "tools" / "check_safety.py", tmp_path])
    assert tuple(done) == (1, f"{tmp_path / 'bad.py'}:1 import pickle\n", "")


# -- layers ---------------------------------------------------------------------------------------


def lint_imports(folder: Path) -> Finished:
    require("import-linter")
    env = clean_environment({"PYTHONPATH": str(folder / "src")})
    return run_command(["lint-imports", "--no-cache"], env=env, cwd=folder)


@pytest.fixture
def copied_tree(tmp_path: Path) -> Path:
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    shutil.copytree(SOURCE, tmp_path / "src")
    return tmp_path


def test_imports_go_down_only(copied_tree: Path) -> None:
    assert lint_imports(copied_tree).returncode == 0


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("comm/bad.py", "import gradsync.train"),  # up
        ("data/bad.py", "def f():\n    from gradsync import models"),  # sideways, and late
        ("nowhere.py", ""),  # in no layer
    ],
)
def test_a_broken_layer_is_found(module: str, text: str, copied_tree: Path) -> None:
    (copied_tree / "src" / "gradsync" / module).write_text(text)
    done = lint_imports(copied_tree)
    assert done.returncode == 1, done.describe()
    assert module.removesuffix(".py").replace("/", ".") in done.stdout


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

before = look()
import MODULE
after = look()
changed = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
print(json.dumps({"changed": changed, "torch": "torch" in sys.modules}))
"""


@pytest.mark.parametrize(
    "module", ["gradsync", "gradsync.errors", "gradsync.world", "gradsync.runtime.environ"]
)
def test_importing_changes_nothing_and_needs_no_torch(module: str) -> None:
    said = json.loads(run_python(["-c", LOOK.replace("MODULE", module)]).ok().stdout)
    assert said == {"changed": {}, "torch": False}


def test_each_package_keeps_to_its_budget() -> None:
    sizes = package_sizes()
    assert sizes.keys() == BUDGETS.keys()
    assert check_budgets(sizes) == []
    assert check_budgets({"sync": BUDGETS["sync"] + 1, "new": 1}) == [
        f"gradsync/sync {BUDGETS['sync'] + 1} lines > {BUDGETS['sync']}",
        "gradsync/new 1 lines > 0",
    ]
