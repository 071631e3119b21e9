"""A hash of a kernel's code, which shows whether a measurement was made with the current code.

Comments, docstrings, layout, and functions that the kernel does not call do not change the hash.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import tokenize
from pathlib import Path

from partool_kernels.registry.kernels import KERNELS

_ROOT = Path(__file__).parents[2]
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_STARTS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


@functools.cache
def source_hash(kernel: str) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a kernel's source; raises KeyError for an unknown kernel."""
    described = KERNELS[kernel]
    texts: dict[tuple[str, str], str] = {}
    _gather("partool_kernels/" + described.source, described.function, texts)
    text = "\n".join(f"{name}\n{texts[path, name]}" for path, name in sorted(texts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gather(path: str, name: str, texts: dict[tuple[str, str], str]) -> None:
    """Add to ``texts`` the code of a name in a file, and the code of all names of partool that this code uses."""
    code = _names(path)
    if name not in code or (path, name) in texts:
        return
    node = code[name]
    if isinstance(node, ast.ImportFrom):
        (alias,) = (each for each in node.names if (each.asname or each.name) == name)
        _gather(str(node.module).replace(".", "/") + ".py", alias.name, texts)
        return
    texts[path, name] = _plain(path, node)
    for used in sorted({each.id for each in ast.walk(node) if isinstance(each, ast.Name)}):
        _gather(path, used, texts)


@functools.cache
def _names(path: str) -> dict[str, ast.stmt]:
    """Return the statements that define or import each name in a file of partool's kernels."""
    statements: dict[str, ast.stmt] = {}
    for node in ast.parse((_ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            statements[node.name] = node
        elif isinstance(node, ast.Assign):
            statements |= {
                each.id: node for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)
            }
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            statements[node.target.id] = node
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("partool_kernels."):
            statements |= {each.asname or each.name: node for each in node.names}
    return statements


def _plain(path: str, node: ast.stmt) -> str:
    """Return a statement's source without comments, docstrings and layout."""
    lines = (_ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True)
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    words, before = [], tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO("".join(lines[first - 1 : node.end_lineno])).readline):
        if token.type in _LAYOUT:
            continue
        if not (token.type == tokenize.STRING and before in _STARTS):
            words.append(tokenize.tok_name[token.type] if token.type in _STARTS else token.string)
        before = token.type
    return " ".join(words)
