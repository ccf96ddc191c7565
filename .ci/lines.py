"""Lines of Python in src by kind, for each folder; exits with 1 when all are more than the budget: `python .ci/lines.py`."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

BUDGET = 86_220
PACKAGE = Path(__file__).resolve().parents[1] / "src" / "slipstream"
KINDS = ("code", "docstring", "comment", "blank")
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count(source: str) -> Counter[str]:
    """How many lines are of each kind. A line with code and a comment is code; a blank line in a docstring is docstring."""
    docstrings, code, comments = set[int](), set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            text = node.body[0]
            docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    total = source.count("\n")
    lines = {"code": len(code), "docstring": len(docstrings), "comment": len(comments - code - docstrings)}
    return Counter(lines | {"blank": total - sum(lines.values())})


def main() -> int:
    folders: dict[str, Counter[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        place = file.relative_to(PACKAGE).parts
        folders.setdefault(place[0] if len(place) > 1 else "(top)", Counter()).update(count(file.read_text()))
    total = Counter[str]()
    for lines in folders.values():
        total.update(lines)
    print(f"{'':12}{'lines':>8}" + "".join(f"{kind:>11}" for kind in KINDS))
    for name, lines in [*sorted(folders.items(), key=lambda item: -item[1].total()), ("all", total)]:
        print(f"{name:12}{lines.total():8,}" + "".join(f"{lines[kind]:11,}" for kind in KINDS))
    if total.total() > BUDGET:
        print(f"src has {total.total():,} lines of Python and its budget is {BUDGET:,}: take some away", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
