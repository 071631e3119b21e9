"""Types for text in specs and plans that must match a pattern, with a description of each pattern.

Lines of ``#SBATCH`` and of Dockerfiles cannot be quoted: a newline would end the line, and the text after it would run.
Names become folders, where ``..`` would lead elsewhere. So such texts must match a pattern; plans are read with the
same patterns, and renderers check again with :func:`fits`.
"""

from __future__ import annotations

import posixpath
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

PATTERNS: dict[str, str] = {}
"""Pattern → description of the texts that it allows."""


def _text(pattern: str, words: str, longest: int | None = None) -> Any:
    PATTERNS[pattern] = words
    return Field(pattern=pattern, max_length=longest)


def _number(value: Any) -> Any:
    """Read a whole number as text: people write ``time: 60`` and ``cpu: 8``."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _option(value: Any) -> Any:
    """Read the value of an option as text: people write ``nice: 100``, ``power: 0.5``, ``hold: true`` and ``hold:``."""
    if value is None or value is True:
        return ""
    return f"{value:.15g}" if isinstance(value, float) else _number(value)


_Number = Annotated[float, Field(ge=-1e300, le=1e300)]
"""A number that the loader of specs accepts."""
_AS_TEXT = BeforeValidator(_number, json_schema_input_type=str | int)
_END = "beginning and ending with a letter or digit"
_DNS = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
_DNS_WORDS = f"lower-case letters, digits and hyphens, in parts joined by dots, each {_END}"

RunName = Annotated[
    str,
    _text(r"^[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?$", f"lower-case letters, digits and hyphens, at most 53, {_END}"),
]
Option = Annotated[
    str,
    _text(r"^[A-Za-z0-9_.@%+:,=/&|*()\[\]-]+$", "letters, digits and _.@%+:,=/&|*()[]-, without blanks", 255),
]
OptionOrNothing = Annotated[
    str,
    _text(r"^[A-Za-z0-9_.@%+:,=/&|*()\[\]-]*$", "letters, digits and _.@%+:,=/&|*()[]-, without blanks", 255),
    BeforeValidator(_option, json_schema_input_type=str | _Number | Literal[True] | None),
]
OptionName = Annotated[
    str, _text(r"^[a-z][a-z0-9-]*$", "the long name of an sbatch option without its dashes, such as mail-type", 64)
]
SetName = Annotated[
    str,
    _text(
        r"^[A-Za-z0-9][A-Za-z0-9_-]*$", "letters, digits, hyphens and underscores, beginning with a letter or digit", 64
    ),
]
FilePath = Annotated[str, _text(r"^[^\x00-\x1f\x7f]+$", "a path without control characters", 4096)]
Label = Annotated[
    str,
    _text(r"^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$", f"letters, digits, dots, _ and -, {_END}, at most 63", 63),
]
LabelKey = Annotated[
    str,
    _text(
        rf"^({_DNS}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?$",
        "a Kubernetes key: example.com/name, or a name of letters, digits, dots, _ and -, at most 63",
        253,
    ),
]
DnsName = Annotated[str, _text(rf"^{_DNS}$", _DNS_WORDS, 253)]
DnsLabel = Annotated[
    str, _text(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", f"lower-case letters, digits and hyphens, {_END}, at most 63")
]
Quantity = Annotated[
    str,
    _text(
        r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$",
        "a number with a unit of Kubernetes, such as 64Gi, 500M, 8 or 1500m",
        32,
    ),
    _AS_TEXT,
]
VariableName = Annotated[str, _text(r"^[A-Za-z_][A-Za-z0-9_]*$", "letters, digits and underscores", 255)]
VariableValue = Annotated[str, _text(r"^[^\x00]*$", "a text without the character NUL")]
Image = Annotated[
    str,
    _text(
        r"^[A-Za-z0-9][A-Za-z0-9_.:/@#+-]*$|^/[^\x00-\x1f\x7f]+$",
        "REGISTRY/NAME:TAG, or the path of an image file",
        1024,
    ),
]
Key = Annotated[
    str, _text(r"^\.?[A-Za-z0-9_-][A-Za-z0-9_.-]*$", "letters, digits, dots, _ and -, not two dots first", 253)
]
MountSource = Annotated[
    str,
    _text(
        rf"^(/[^\x00-\x1f\x7f:,]*|pvc:{_DNS})$",
        "an absolute path without colons and commas, or pvc:CLAIM",
    ),
]
MountTarget = Annotated[
    str, _text(r"^/[^\x00-\x1f\x7f:,]*$", "an absolute path within the container, without colons and commas", 1024)
]
Claim = Annotated[str, _text(rf"^pvc:{_DNS}$", "pvc:CLAIM, the name of a volume claim", 257)]
TimeLimit = Annotated[
    str,
    _text(r"^(\d+-\d{1,2}(:\d{1,2}){0,2}|\d+(:\d{1,2}){0,2})$", "D-HH:MM:SS, HH:MM:SS or minutes", 32),
    _AS_TEXT,
]
Memory = Annotated[str, _text(r"^\d+[KMGT]?$", "a whole number with K, M, G or T; without one, MB", 32), _AS_TEXT]
GpuType = Annotated[str, _text(r"^[A-Za-z0-9_.-]+$", "letters, digits, dots, _ and -", 64)]
MigProfile = Annotated[str, _text(r"^[1-9]g\.[1-9][0-9]{0,3}gb$", "a MIG profile such as 3g.40gb", 12)]
Identifier = Annotated[str, _text(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", "a name of letters, digits, _, dots and -", 255)]
"""Name of a class of transformers, or of a model type."""
ModuleName = Annotated[
    str, _text(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$", "a class as package.module:Class", 255)
]
Title = Annotated[str, _text(r"^[^\x00-\x1f\x7f]+$", "one line of text, at most 128 characters", 128)]
Address = Annotated[str, _text(r"^[^\s\x00-\x1f\x7f]+$", "a path or an address without blanks", 2048)]
WebAddress = Annotated[str, _text(r"^https?://[^\s\x00-\x1f\x7f/]+\S*$", "an address that begins with https://", 2048)]
Argument = Annotated[str, _text(r"^[^\x00]+$", "a text without the character NUL", 4096)]
Sha256 = Annotated[str, _text(r"^([0-9a-f]{64})?$", "64 hexadecimal digits, or nothing")]


def fits(kind: Any, text: str) -> bool:
    """Return True if ``text`` matches the pattern of ``kind``, one of the types of this module."""
    try:
        _adapter(kind).validate_python(text)
    except ValidationError:
        return False
    return True


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


_IMAGE_FILES = (".sif", ".img", ".sqsh")


def within(path: str, folder: str) -> bool:
    """Return True if ``path`` is ``folder`` or lies below ``folder``."""
    return f"{posixpath.normpath(path)}/".startswith(f"{posixpath.normpath(folder).rstrip('/')}/")


def is_image_file(image: str) -> bool:
    """Return True if ``image`` is the path of a file on the nodes instead of a name in a registry."""
    return image.startswith("/") or image.endswith(_IMAGE_FILES)
