"""The wheel has all that the package needs, and works where there is no repository."""

from __future__ import annotations

import sys
from pathlib import Path
from zipfile import ZipFile

from support.launchers import clean_environment, run_command
from support.requirements import require

ROOT = Path(__file__).parents[2]
ASK = """
import gradsync
from gradsync.commands.cli.main import main
print(gradsync.__file__)
for line in LINES:
    assert main(line.split()) == 0, line
"""
LINES = ("--version", "train mini --dry-run", "submit --time=60 --dry-run -- train tiny")


def test_a_wheel_works_without_the_repository(tmp_path: Path) -> None:
    """Every file of the package is in it; a preset is loaded and a template filled."""
    require("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory"]
    run_command([*build, tmp_path / "dist"], cwd=ROOT).ok()
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with ZipFile(wheel) as file:
        names = set(file.namelist())
        file.extractall(tmp_path / "site")
    own = {name for name in names if name.startswith("gradsync/")}
    assert own == {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    others = {name.partition("/")[2] for name in names - own}
    assert others == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    environment = clean_environment({"PYTHONPATH": str(tmp_path / "site")})
    code = ASK.replace("LINES", repr(LINES))
    done = run_command([sys.executable, "-P", "-c", code], env=environment, cwd=tmp_path).ok()
    assert done.stdout.startswith(str(tmp_path / "site" / "gradsync"))
    assert "\npreset: mini\n" in done.stdout
    assert "#SBATCH --time=" in done.stdout
