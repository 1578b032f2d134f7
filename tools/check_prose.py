"""Turns of phrase that a native reader stumbles over, in docstrings, comments and pages.

    python tools/check_prose.py [PATH …]      each of them, with its place; default: src and docs

Each can be right, so a few are allowed: exits with 1 above `MOST` per 1,000 words. The pages of
torch's FSDP2 have none. The changelog and the log are not checked; quotes and code blocks are not
prose.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from source_tree import REPOSITORY

MOST = 1.0
PHRASES = re.compile(
    r"""
    \b( of\ which | so\ many | without\ a\ word | there\ is\ none | a\ W-th | for\ ever | in\ vain
      | (is|are|was|were)\ (said|told) | of\ (its|their|his)\ own | the\ user's\ own | one's\ own
      | where\ (that|it|they|this|there|none|one|ranks?) | (has|have)\ come | has\ gone | lest
      | as\ they\ (are|come|were) | beside | (inside|outside)\ of | anew | most\ often | mended?
      | behind\ (it|them) | half\ of\ a | such\ a | somebody | nobody | those\ (that|who)
      | what\ (it|they|that|this)\ (is|are|does|has) )\b
    """,
    re.VERBOSE | re.IGNORECASE,
)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of docstrings and comments, or of a page without its code blocks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        in_code = False
        for number, line in enumerate(text.splitlines(), 1):
            fence = line.lstrip().startswith("```")
            in_code ^= fence
            if not (in_code or fence):
                yield number, line
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from enumerate(str(node.value.value).splitlines(), node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def check(paths: list[Path]) -> tuple[int, list[str]]:
    """Number of words, and a line for each phrase."""
    words, found = 0, []
    for path in paths:
        for number, line in prose(path):
            words += len(line.split())
            found += [f"{path}:{number}: {each[0]!r}" for each in PHRASES.finditer(line)]
    return words, found


def main(names: list[str]) -> int:
    """Returns the exit code."""
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    pages = [page for page in pages if page.name not in ("CHANGELOG.md", "LOG.md")]
    texts = {"src": sorted(REPOSITORY.glob("src/**/*.py")), "docs": sorted(pages)}
    code = 0
    for what, paths in (
        {"given": [Path(name) for name in names]}.items() if names else texts.items()
    ):
        words, found = check(paths)
        rate = 1000 * len(found) / max(words, 1)
        over = rate > MOST
        print(*(found if names or over else ()), sep="\n", end="\n" if found and over else "")
        print(f"{what}: {len(found)} in {words:,} words, {rate:.1f} per 1,000 (at most {MOST})")
        code |= over
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
