"""Members of enumerations, which Python before 3.11.4 pickles as attributes of their class."""

from __future__ import annotations

import pytest

from partool_runtime.checkpoint._metadata import ALLOWED
from partool_runtime.checkpoint._pickled import GlobalName, PickledCall, PickleError, read

MODULE, CLASS = "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"


def of_attribute(owner: bytes, name: bytes = b"X\x04\x00\x00\x00NAME") -> bytes:
    return b"\x80\x02cbuiltins\ngetattr\n" + owner + name + b"\x86R."


def test_a_member_is_read_as_a_call_of_its_class() -> None:
    member = read(of_attribute(f"c{MODULE}\n{CLASS}\n".encode()), ALLOWED)
    assert isinstance(member, PickledCall)
    assert (member.name, member.arguments) == (GlobalName(MODULE, CLASS), ("NAME",))


@pytest.mark.parametrize(
    "data", [of_attribute(b"X\x02\x00\x00\x00os"), of_attribute(f"c{MODULE}\n{CLASS}\n".encode(), b"K\x01")]
)
def test_attributes_of_anything_else_are_refused(data: bytes) -> None:
    with pytest.raises(PickleError, match="attribute of a value that is no class"):
        read(data, ALLOWED)


def test_other_modules_are_refused() -> None:
    with pytest.raises(PickleError, match="os"):
        read(of_attribute(b"cos\nenviron\n"), ALLOWED)
