"""What a script imports before it does anything else, found in its text and that of the modules beside it. Nothing of it is run."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_PACKAGES = {"site-packages", "dist-packages"}
_MAKERS = {"getLogger", "Path", "TypeVar", "ParamSpec", "namedtuple", "NamedTuple", "partial", "field", "compile", "get", "Lock"}
_MAKERS |= {"int", "float", "str", "bool", "tuple", "list", "dict", "set", "frozenset", "range", "len", "max", "min", "device"}


class Walk:
    """The statements by which a script, directly or through the user's own modules, imports installed packages, in execution order,
    up to the first statement that does anything else."""

    def __init__(self, script: Path, folder: Path) -> None:
        """`folder`: where modules are searched first."""
        self.found: list[ast.stmt] = []
        self.changes_environment = False
        self._seen: set[Path] = set()
        packages = [place / "__init__.py" for place in reversed(script.relative_to(folder).parents[:-1])]  # of a script with -m
        self.is_whole = all(self._read(file) for file in (*(folder / place for place in packages), script))

    @property
    def is_fit(self) -> bool:
        """Whether ranks may start with all of these packages and Slipstream imported."""
        modules = {name.parts[0] for node in self.found for _, names in _modules(node, Path("/")) for name in names}
        return not self.changes_environment and (self.is_whole or bool(modules & {"slipstream", "deepspeed"}))

    def _read(self, file: Path) -> bool:
        """Whether all of the file except its main part only imports and defines."""
        if file in self._seen:
            return True
        self._seen.add(file)
        try:
            statements = ast.parse(file.read_bytes()).body
        except (OSError, SyntaxError, ValueError, RecursionError):
            return not file.exists()
        self.changes_environment |= any(map(_changes_environment, itertools.chain.from_iterable(map(ast.walk, statements))))
        for statement in statements:
            match statement:
                case ast.Import() | ast.ImportFrom():
                    if not all(self._follow(node, names) for node, names in _modules(statement, file)):
                        return False
                case ast.Expr(value=ast.Constant()) | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    pass
                case ast.Assign(targets=[ast.Name()]) | ast.AnnAssign(target=ast.Name()) if _only_makes(statement):
                    pass
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    pass
                case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                    pass
                case _:
                    return False
        return True

    def _follow(self, node: ast.stmt, names: list[Path]) -> bool:
        if names[0].is_absolute():
            return all(map(self._read_module, names))
        spec = _find(package := names[0].parts[0])
        places = [] if spec is None else [Path(place) for place in (spec.origin, *(spec.submodule_search_locations or ())) if place]
        if spec is None or package == "slipstream" or any(_PACKAGES & {*place.parts} for place in places):
            self.found.append(node)  # a missing package fails here as in the rank
            return True
        if not spec.submodule_search_locations and (not spec.has_location or _is_of_python(places[0])):
            return True
        if spec.submodule_search_locations:
            if any(map(_is_of_python, places)):
                return True
            folders = [Path(place).parent for place in spec.submodule_search_locations]
        else:
            folders = [places[0].parent]
        chain = [part for name in names for part in (*reversed(name.parents[:-1]), name)]  # a package runs before its modules
        return all(self._read_module(folder / part) for folder in folders for part in chain)

    def _read_module(self, place: Path) -> bool:
        return all(map(self._read, (place.with_name(f"{place.name}.py"), place / "__init__.py")))


def _is_of_python(place: Path) -> bool:
    return str(place).startswith(sysconfig.get_path("stdlib"))


def _modules(statement: ast.stmt, file: Path) -> Iterator[tuple[ast.stmt, list[Path]]]:
    """Split an import in `file` by package. Yields, for each, a statement that imports only it, and the modules that this may
    import, as paths: relative to the search folder, or absolute for a relative import."""
    match statement:
        case ast.Import(names=names):
            for alias in names:
                yield ast.Import([alias]), [Path(*alias.name.split("."))]
        case ast.ImportFrom(module=module, names=names, level=level) if level <= len(file.parents):
            root = file.parents[level - 1] if level else Path()
            parent = root.joinpath(*(module or "").split("."))
            between = [place for place in reversed(parent.parents) if level and place.is_relative_to(root) and place != root]
            yield statement, [*between, parent, *(parent / alias.name for alias in names if alias.name != "*")]


def _only_makes(statement: ast.stmt) -> bool:
    """Whether a statement calls nothing, or only functions known to create values without side effects."""
    functions = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return all(getattr(each, "attr", getattr(each, "id", "")) in _MAKERS for each in functions)


def _changes_environment(node: ast.AST) -> bool:
    """Whether a part of a statement sets or deletes environment variables, or may do so."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="environ") | ast.Name(id="environ"), ctx=ast.Store() | ast.Del()):
            return True
        case ast.AugAssign(target=ast.Attribute(attr="environ") | ast.Name(id="environ")):
            return True
        case ast.Call(func=ast.Attribute(attr=name, value=ast.Attribute(attr="environ") | ast.Name(id="environ"))):
            return name not in ("get", "copy", "items", "keys", "values")
        case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv" | "load_dotenv") | ast.Name(id="load_dotenv")):
            return True
    return False


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
