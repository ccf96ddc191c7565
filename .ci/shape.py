"""The shape of src: long and complex functions, wide classes, the biggest import circle of train; exits with 1 above a limit.

`python .ci/shape.py` prints the counts, `python .ci/shape.py -v` also the functions and the files. Limits only go down.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "slipstream"
MOST_LINES, MOST_BRANCHES = 60, 15  # of a function
LIMITS = {
    "functions of more than 60 lines": 2,
    "functions of cyclomatic complexity over 15": 8,
    "attributes of zero.unit.Unit": 25,
    "attributes of train.engine.Engine": 25,
    "attributes of train.states.States": 27,
    "files in the biggest import circle of train": 0,
    "class names of several classes": 1,
    "asserts that something is not None": 17,
}
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[_Function]:
    return (node for node in ast.walk(tree) if isinstance(node, _Function))


def complexity(function: _Function) -> int:
    """McCabe's number: one more than the branches. Functions defined inside count on their own."""
    branches, nodes = 1, list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, _Function):
            continue
        if isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            branches += len(node.ifs)
        elif isinstance(node, _BRANCHES):
            branches += 1
        nodes += ast.iter_child_nodes(node)
    return branches


def attributes(file: str, name: str) -> set[str]:
    """The attributes that the class assigns to `self` anywhere, and its class-level fields. Methods and properties do not count."""
    tree = ast.parse((PACKAGE / file).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name).body
    fields = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    fields += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    names = {target.id for target in fields if isinstance(target, ast.Name)}
    for function in (node for node in body if isinstance(node, _Function)):
        names |= {
            node.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
    return names


def _imports(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports, also inside functions and for types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def biggest_circle(folder: str) -> list[str]:
    """The files of the biggest strongly connected component of the folder's imports; [] if there is no circle."""
    paths = [file for file in sorted((PACKAGE / folder).rglob("*.py")) if file.stem != "__init__"]
    files = {".".join(["slipstream", *file.relative_to(PACKAGE).with_suffix("").parts]): file for file in paths}
    imports = {name: set(_imports(ast.parse(file.read_text()))) & files.keys() for name, file in files.items()}

    def reachable(name: str) -> set[str]:
        reached, stack = set[str](), [name]
        while stack:
            for imported in imports[stack.pop()] - reached:
                reached.add(imported)
                stack.append(imported)
        return reached

    reaches = {name: reachable(name) for name in files}
    circles = [[other for other in reaches[name] if name in reaches[other]] for name in files]
    return sorted(max(circles, key=len, default=[]))


def shared_names() -> list[str]:
    """Names that several classes bear. DeepSpeed's (compat/) and those of JSON (`Block`, `Strict`, `TypedDict`) are given."""
    places: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        place = str(file.relative_to(PACKAGE))
        for node in () if place.startswith("compat/") else ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not {ast.unparse(base) for base in node.bases} & {"Block", "Strict", "TypedDict"}:
                places.setdefault(node.name, []).append(place)
    return [f"{name}: {', '.join(files)}" for name, files in sorted(places.items()) if len(files) > 1]


def asserts_not_none() -> list[str]:
    return [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assert) and "is not None" in ast.unparse(node.test)
    ]


def measure() -> dict[str, list[str]]:
    """What is counted, by the names of `LIMITS`."""
    sized = [
        (
            f"{file.relative_to(PACKAGE)}:{each.lineno} {each.name}",
            (each.end_lineno or each.lineno) - each.lineno + 1,
            complexity(each),
        )
        for file in sorted(PACKAGE.rglob("*.py"))
        for each in functions(ast.parse(file.read_text()))
    ]
    results = (
        [f"{name}: {lines} lines" for name, lines, _ in sized if lines > MOST_LINES],
        [f"{name}: {branches}" for name, _, branches in sized if branches > MOST_BRANCHES],
        sorted(attributes("zero/unit.py", "Unit")),
        sorted(attributes("train/engine.py", "Engine")),
        sorted(attributes("train/states.py", "States")),
        biggest_circle("train"),
        shared_names(),
        asserts_not_none(),
    )
    return dict(zip(LIMITS, results, strict=True))


def main() -> int:
    counts, failed = measure(), False
    for name, items in counts.items():
        print(f"{len(items):5} of at most {LIMITS[name]:3}  {name}")
        if "-v" in sys.argv[1:]:
            print("".join(f"      {item}\n" for item in items), end="")
        if len(items) > LIMITS[name]:
            print(f"{name}: {len(items)}, limit {LIMITS[name]}: {', '.join(items)}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
