"""Runs the user's modules from the bytes whose hashes a plan holds, and refuses others before they run.

A finder at the front of ``sys.meta_path`` sees each import. Modules of the standard library and of installed packages
pass. A file from elsewhere, or of the package that the spec names, is the user's code: it is compiled from the bytes
that were hashed, never from ``__pycache__``, which has no hash. https://docs.python.org/3/reference/import.html
"""

from __future__ import annotations

import hashlib
import site
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from partool.spec.model_code import file_of_module
from partool_runtime.errors import ConfigurationError

_PLAN_AGAIN = "Look at what changed, and plan again with --trust-remote-code."
_OURS = ("partool", "partool_runtime", "partool_kernels")
_INSTALLED = ("site-packages", "dist-packages")


class UserCode(MetaPathFinder):
    """Checks the files that a user's module consists of, or records them.

    ``allowed`` holds the hash of each file by the name that :func:`partool.spec.model_code.file_of_module` gives it;
    None allows all and records them in ``files``.
    """

    def __init__(self, package: str, folder: str, allowed: Mapping[str, str] | None) -> None:
        self.files: dict[str, str] = {}
        """Files that were loaded so far: name → SHA-256 of the content."""
        self._package, self._folder, self._allowed = package, Path(folder).resolve(), allowed
        self._before = {name.partition(".")[0] for name in sys.modules} | set(_OURS)
        self._roots = [Path(root).resolve() for root in _installed_roots()]
        self._search = threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module that the other finders find; raises ConfigurationError PT591 or PT655 for refused code."""
        if getattr(self._search, "runs", False):  # one of the other finders asks all finders
            return None
        self._search.runs = True
        try:
            others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
            spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        finally:
            self._search.runs = False
        if spec is None or spec.origin is None or not spec.has_location or not self._is_users(name, spec.origin):
            return spec  # a package without a file, a namespace, runs nothing
        file = file_of_module(name, Path(spec.origin), package=spec.submodule_search_locations is not None)
        if type(spec.loader) is SourceFileLoader:
            spec.loader = _CheckedSource(name, spec.origin, self, file)
        elif isinstance(spec.loader, ExtensionFileLoader | SourcelessFileLoader):
            self.check(file, Path(spec.origin).read_bytes())
        else:
            kind = type(spec.loader).__name__
            message = f"the module {name} of {spec.origin} is loaded by {kind}, whose code cannot be checked"
            raise ConfigurationError("PT655", message, "Put it into a folder as a file; an archive is unpacked first.")
        return spec

    def check(self, file: str, content: bytes) -> None:
        """Raise ConfigurationError PT591 unless a file with this content is allowed; note that it was loaded."""
        digest = hashlib.sha256(content).hexdigest()
        if self._allowed is not None and self._allowed.get(file) != digest:
            problem = "is not the one that was allowed" if file in self._allowed else "was not loaded"
            raise ConfigurationError("PT591", f"the file {file} {problem} when the plan was made", _PLAN_AGAIN)
        self.files[file] = digest

    def _is_users(self, name: str, origin: str) -> bool:
        """Return whether a module is code of the user, and not of Python or of an installed package."""
        top, file = name.partition(".")[0], Path(origin).resolve()
        if top == self._package:
            return True
        if any(file.is_relative_to(root) for root in self._roots):
            return False
        return file.is_relative_to(self._folder) or top not in self._before


class _CheckedSource(SourceFileLoader):
    """Loads a module from its source, whose content is checked first."""

    def __init__(self, name: str, path: str, code: UserCode, file: str) -> None:
        super().__init__(name, path)
        self._code, self._file = code, file

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the checked bytes."""
        content = self.get_data(self.path)
        self._code.check(self._file, content)
        compiled: CodeType = self.source_to_code(content, self.path)
        return compiled


def _installed_roots() -> list[str]:
    """Return the folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    listed = [entry for entry in sys.path if Path(entry).name in _INSTALLED]
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [*roots, *site.getsitepackages(), site.getusersitepackages(), *listed]


def installed(package: str, folder: str, allowed: Mapping[str, str] | None) -> UserCode:
    """Put ``folder`` on the module path, and a check of the user's code before all other finders; return the check.

    A process has one; a check with other files replaces it.
    """
    for finder in [each for each in sys.meta_path if isinstance(each, UserCode)]:
        if finder._allowed is not None and (finder._package, finder._folder, finder._allowed) == (
            package, Path(folder).resolve(), allowed,
        ):  # fmt: skip
            return finder
        sys.meta_path.remove(finder)
    code = UserCode(package, folder, allowed)
    sys.meta_path.insert(0, code)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return code
