"""Lines of Python in src by kind, for each folder: `python .ci/lines.py`. Exits with 1 when a folder has more than its budget, or
so much less that it could grow back: what is taken away stays away, and a feature that needs room says so here."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

BUDGETS = {
    "inference": 19_754,
    "train": 10_984,
    "compat": 9_131,
    "zero": 6_344,
    "parallel": 6_189,
    "ops": 6_028,
    "launch": 5_307,
    "checkpoint": 5_395,
    "config": 4_469,
    "optim": 2_861,
    "moe": 2_243,
    "observe": 2_081,
    "world": 1_839,
    "compression": 1_330,
    "data": 1_251,
    "attention": 1_076,
    "activations": 779,
    "quantized": 762,
    "fused": 508,
    "integrations": 223,
    "(top)": 97,
}
SLACK = 0.01  # of a budget, or 20 lines
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
    faults = [fault(name, folders.get(name, Counter()).total(), BUDGETS.get(name, 0)) for name in sorted({*folders, *BUDGETS})]
    print("".join(faults), end="", file=sys.stderr)
    return int(any(faults))


def fault(name: str, lines: int, budget: int) -> str:
    if lines > budget:
        return f"{name} has {lines:,} lines of Python and its budget is {budget:,}: take some away\n"
    if lines < budget - max(20, SLACK * budget):
        return f"{name} has {lines:,} lines of Python: lower its budget, {budget:,}\n"
    return ""


if __name__ == "__main__":
    sys.exit(main())
