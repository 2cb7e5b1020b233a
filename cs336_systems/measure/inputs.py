"""The user's own inputs of a run: the source of a model or kernel, a token file. Source is found
without importing it.

Left out: installed packages, and any files that the code reads.
"""

import ast
import contextlib
import datetime
import difflib
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from .. import places_of
from ..config import RunConfig
from ..model_file import PARAMETERS, is_model_file, path_of_model, read_model_file
from ..record import Input

_INSTALLED = ("site-packages", "dist-packages")
_IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+(\w+)[\w.]*[ \t]+import\b|import[ \t]+([^#;\n]+))",
    re.MULTILINE | re.ASCII,
)
_DYNAMIC = re.compile(
    r"import\s*\*|__path__|__getattr__|sys\.modules|\b(?:global|globals|vars|exec)\b"
    r"|\bsetattr\b(?!\s*\(\s*self\b)"
)
"""Signs that a module has names or submodules that its source text does not show.

`setattr(self, ...)` is none: it sets an attribute of an object, such as a layer of a model.
"""
_OWN_PACKAGE = __name__.partition(".")[0]
_FIRST_NAMES = re.compile(rb"(?:^|,)\s*(\w+)", re.ASCII)


def inputs_of(config: RunConfig) -> tuple[Input, ...]:
    """Current state of the user's files that the run depends on; none for this project's model
    on random tokens.
    """
    return all_inputs([config])


def all_inputs(configs: Iterable[RunConfig]) -> tuple[Input, ...]:
    """Inputs of all the runs; each is listed once and read once."""
    names: dict[str | None, None] = {}  # sets that keep the order
    files: dict[str | None, None] = {}
    for config in configs:
        names |= dict.fromkeys((config.model_factory, config.own_ddp, config.own_optimizer))
        files[config.tokens] = None
    inputs = [source_of(name) for name in names if name is not None]
    for file in files:
        if file is not None:
            inputs.append(Input(name=f"token file {file}", state=_file_state(Path(file))))
    return tuple(inputs)


def source_of(name: str) -> Input:
    """Current state of the source of `package.module:name`, or of a model's configuration file."""
    if is_model_file(name):
        return Input(name=f"source of {name}", state=_digest_of_file(path_of_model(name)))
    return Input(name=f"source of {name}", state=source_digest(name.partition(":")[0]))


def source_digest(module: str) -> str | None:
    """Digest of the source of the module, or of the package that contains it; None if no source is
    found.

    Modules that it imports from its own directory count too, unless that is a directory of
    installed packages.
    """
    waiting = _locations(top := module.partition(".")[0])
    root = waiting[0].parent if waiting and waiting[0].parent.name not in _INSTALLED else None
    digest = hashlib.sha256()
    known = {top}
    files: dict[str, bytes] = {}
    while waiting:
        for name, source in _sources(waiting.pop(0)):
            files.setdefault(name, source)
            if root is not None:
                imported = _imported(source) - known
                waiting += _beside(root, imported)
                known |= imported
    for name, source in sorted(files.items()):
        digest.update(f"{name}\0{len(source)}\0".encode(errors="surrogateescape"))
        digest.update(source)
    return digest.hexdigest()[:16] if files else None


def check_factory(name: str, flag: str = "--model") -> None:
    """Raise ValueError if there is no module of `package.module:factory`, or if its source has no
    such word.

    Nothing is imported. Where the source does not show all names, any name is accepted. The message
    names `flag`.
    """
    if is_model_file(name):
        read_model_file(name)
        return
    module, _, attribute = name.partition(":")
    first, wanted = module.partition(".")[0], attribute.partition(".")[0]
    if _find(first) is None:
        raise ValueError(f"{flag} {name}: no module {first!r}, in this directory or installed")
    file, top = _file_of(module), _file_of(first)
    modules = [path for path in {file, top} if path and path.suffix == ".py"]
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in modules]
    if not sources or any(map(_DYNAMIC.search, sources)) or _file_of(f"{module}.{wanted}"):
        return
    if file is None:
        raise ValueError(f"{flag} {name}: no module {module!r}")
    source = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".py" and wanted not in re.findall(r"\w+", source):
        defined = re.findall(r"^(?:class|(?:async )?def) (\w+)|^(\w+) *=", source, re.MULTILINE)
        close = difflib.get_close_matches(wanted, map("".join, defined), n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{flag} {name}: no {wanted!r} in module {module!r}{meant}")


def parameters_of(name: str) -> set[str] | None:
    """Names of the parameters of `package.module:factory`, read from its source; None if the source
    cannot tell.

    It tells for a function or a class with `__init__` that the module defines once, without a
    decorator.
    """
    if is_model_file(name):
        return {*PARAMETERS}
    module, _, attribute = name.partition(":")
    file = _file_of(module)
    try:
        tree = ast.parse(file.read_bytes() if file else b"")
    except (OSError, SyntaxError, ValueError):
        return None
    maker = _defined_once(ast.walk(tree), attribute)
    if maker not in tree.body:
        return None
    if isinstance(maker, ast.ClassDef):
        maker = _defined_once(maker.body, "__init__", "__new__")
    if not isinstance(maker, ast.FunctionDef):
        return None
    arguments = maker.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg for argument in named}


def _defined_once(nodes: Iterable[ast.AST], *names: str) -> ast.FunctionDef | ast.ClassDef | None:
    """The function or class among the nodes that has one of these names; None if there is none, or
    there are several, or it has a decorator.
    """
    defined = []
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            defined.append(node)
    return defined[0] if len(defined) == 1 and not defined[0].decorator_list else None


def _file_of(module: str) -> Path | None:
    """The file of a module, found without importing the packages that it is in."""
    first, *below = module.split(".")
    for location in _locations(first):
        path = location.joinpath(*below)
        for file in (path, path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def _locations(module: str) -> list[Path]:
    """The file or the directories from which a worker would import a top-level module."""
    spec = _find(module)
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(location) for location in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.has_location and spec.origin else []


def _find(module: str) -> ModuleSpec | None:
    """The import system's description of a top-level module, looked for in the current directory
    too.
    """
    if module == _OWN_PACKAGE:
        return sys.modules[module].__spec__
    with contextlib.suppress(ImportError, ValueError):  # a loaded module may have no __spec__
        return PathFinder.find_spec(module, places_of(module)) or importlib.util.find_spec(module)
    return None


def _sources(location: Path) -> list[tuple[str, bytes]]:
    """Relative name and content of the file, or of each Python file in the directory; unreadable
    ones are left out.
    """
    paths = sorted(location.rglob("*.py")) if location.is_dir() else [location]
    sources = []
    for path in paths:
        name = path.relative_to(location.parent)
        with contextlib.suppress(OSError):
            if not any(part.startswith(".") or part in _INSTALLED for part in name.parts):
                sources.append((name.as_posix(), path.read_bytes()))
    return sources


def _beside(root: Path, names: set[str]) -> list[Path]:
    """Modules and packages of these names in `root`, without this package, which has its own
    digest.
    """
    beside = []
    for name in sorted(names - {_OWN_PACKAGE}):
        # asked first, because finding a module elsewhere on the path takes long
        if (root / name).is_dir() or (root / f"{name}.py").is_file():
            beside += [path for path in _locations(name) if path.parent == root]
    return beside


def _imported(source: bytes) -> set[str]:
    """Top-level names of the absolute imports in the source, found by line: parsing a large
    package takes seconds.
    """
    names: set[bytes] = set()
    for package, modules in _IMPORT.findall(source):
        names.update([package] if package else _FIRST_NAMES.findall(modules))
    return {name.decode() for name in names}


def _digest_of_file(path: Path) -> str | None:
    """Digest of a file's content; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def _file_state(path: Path) -> str | None:
    """Size and time of the last change, as reading the content would take long; None if there is
    no such file.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
    written = datetime.datetime.fromtimestamp(seconds, datetime.UTC).replace(tzinfo=None)
    return f"{status.st_size} bytes, written {written.isoformat()}.{nanoseconds:09}Z"
