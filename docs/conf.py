"""The pages as a site: `make docs` (Sphinx, MyST, furo).

The sources are the whole repository, since pages link to README.md, ARCHITECTURE.md and code; what
is built is listed in `include_patterns`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gradsync import __version__

project = "gradsync"
release = __version__
copyright = "the authors of gradsync; MIT licence"  # noqa: A001  Sphinx's name

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "dist", "runs", "data", "src", "tests"]
myst_heading_anchors = 4
highlight_language = "none"  # a block without a language is output

default_role = "literal"  # `names` in docstrings
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"gradsync {release}"
html_copy_source = html_show_sourcelink = False


def keep_blocks(
    _app: Any, _kind: str, _name: str, _of: Any, _options: Any, lines: list[str]
) -> None:
    """Indented blocks after a blank line stay as they are, as in Markdown: tables, examples."""
    indents = [len(line) - len(line.lstrip()) for line in lines]
    text = 0  # the indent of the paragraph before
    blocks = []
    for number, line in enumerate(lines):
        begins = number == 0 or not lines[number - 1]
        if line and begins and number and indents[number] > text:
            blocks.append((number, text))
        elif line:
            text = indents[number]
    for number, indent in reversed(blocks):
        lines[number:number] = [" " * indent + "::", ""]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", keep_blocks, priority=1)  # before napoleon
