"""Attack ``pickles``: checkpoints whose ``.metadata`` would run code, by every opcode that can call something.

The manifest's digests match the forged file, as an attacker's would. Reading gives tensors or a finding; no code runs.
"""

from __future__ import annotations

import builtins
import copyreg
import os
import pickle
import random
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _attack import Attack
from torch.distributed.checkpoint.metadata import Metadata

from partool_runtime.checkpoint import Checkpointer, load_folder, tensor_shapes
from partool_runtime.checkpoint._files import file_digest
from partool_runtime.checkpoint._manifest import MANIFEST, read_manifest, step_folder
from partool_runtime.errors import ConfigurationError

METADATA = ".metadata"
PLACE = "a place for harm"
EXTENSION = 0x7FFF1234
"""Extension number registered for ``os.system``: the EXT opcodes push the object registered under a number."""


def text(value: str) -> bytes:
    """Return the opcode that pushes a text."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def by_global(module: str, name: str) -> bytes:
    """Return the opcodes that push a global with GLOBAL."""
    return f"c{module}\n{name}\n".encode()


def by_stack_global(module: str, name: str) -> bytes:
    """Return the opcodes that push a global with STACK_GLOBAL."""
    return text(module) + text(name) + b"\x93"


def harms(canary: Path, rng: random.Random) -> Iterator[bytes]:
    """Yield pickle programs that leave one value on the stack and write the canary file if they are run."""
    touch = f"touch {canary}"
    push = rng.choice([by_global, by_stack_global])
    system = push(*rng.choice([("os", "system"), ("posix", "system"), ("subprocess", "getoutput")]))
    calls = [
        (system, text(touch)),
        (push("builtins", rng.choice(["eval", "exec"])), text(f"__import__('os').system({touch!r})")),
        (push("builtins", "open"), text(str(canary)) + text("w")),
        (push("subprocess", "Popen"), b"]" + b"(" + text("touch") + text(str(canary)) + b"e"),
        # through an allowed module, and a module that it imports
        (by_stack_global("torch.distributed.checkpoint.metadata", "os.system"), text(touch)),
        (by_stack_global("torch", "os.system"), text(touch)),
        (by_stack_global("torch.serialization", "os.system"), text(touch)),
    ]
    for function, arguments in calls:
        pushed = b"(" + arguments + b"t"
        yield function + pushed + b"R"  # REDUCE
        yield function + pushed + b"\x81"  # NEWOBJ
        yield function + pushed + b"}" + b"\x92"  # NEWOBJ_EX
        yield b"(" + function + arguments + b"o"  # OBJ
        yield by_global("torch", "Size") + b"(" + function + pushed + b"R" + b"t" + b"R"  # inside an allowed call
    yield b"(" + text(touch) + b"ios\nsystem\n"  # INST
    yield b"(" + text(touch) + b"iposix\nsystem\n"
    for extension in (b"\x84" + struct.pack("<i", EXTENSION), b"\x82\xf1", b"\x83" + struct.pack("<H", 0xF1F1)):
        yield extension + b"(" + text(touch) + b"tR"  # EXT4, EXT1, EXT2
    yield push("builtins", "getattr") + b"(" + push("os", "path") + text("os") + b"tR"
    # BUILD: an attribute of an allowed class becomes a function
    state = b"N}" + text("__new__") + system + b"s\x86"
    yield by_global("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata") + state + b"b"
    yield b"P" + touch.encode() + b"\n"  # PERSID
    yield text(touch) + b"Q"  # BINPERSID


class Harm:
    """Object that is pickled as a call."""

    def __init__(self, call: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class Target:
    """Checkpoint whose ``.metadata`` is replaced."""

    def __init__(self, folder: Path) -> None:
        checkpointer = Checkpointer(folder, keep=1, mode="sync", rank=0, world_size=1)
        self.state = {"model.a": torch.ones(3, 5), "model.b": torch.ones(2, dtype=torch.bfloat16)}
        self.state |= {f"exp_avg.{name}": torch.ones(2, 3, dtype=torch.float64) for name in "ab"}
        checkpointer.save(1, self.state, {"step": 1}, wait=True)
        checkpointer.close()
        self.path, self.canary = step_folder(folder, 1), folder / "canary"
        self.manifest = read_manifest(self.path)
        self.sound = (self.path / METADATA).read_bytes()

    def metadata(self) -> Metadata:
        """Return the intact metadata, for the caller to change."""
        found = pickle.loads(self.sound)
        assert isinstance(found, Metadata)
        return found

    def put(self, data: bytes) -> None:
        """Replace the metadata, and write its size and digest into the manifest."""
        file = self.path / METADATA
        file.write_bytes(data)
        self.manifest.files[METADATA] = (len(data), file_digest(file))
        (self.path / MANIFEST).write_bytes(self.manifest.to_bytes())

    def read(self) -> bool:
        """Read the checkpoint, as an export and a resumed run do; return False where it is refused with a finding."""
        try:
            tensor_shapes(self.path)
            load_folder(self.path, {name: torch.zeros_like(value) for name, value in self.state.items()})
        except ConfigurationError as error:
            if error.code not in ("PT611", "PT612", "PT685"):
                raise
            return False
        finally:
            ran = self.canary.exists()
            self.canary.unlink(missing_ok=True)
            assert not ran, "the code ran"
        return True


def with_value(metadata: Metadata, value: Any, rng: random.Random) -> Metadata:
    """Return metadata with a value put somewhere in it."""
    tensor = rng.choice(list(metadata.state_dict_metadata.values()))
    info = rng.choice(list(metadata.storage_data.values()))
    places: list[tuple[Any, str]] = [
        (metadata, "planner_data"), (metadata, "version"), (metadata, "storage_meta"), (tensor, "size"),
        (tensor, "properties"), (tensor, "chunks"), (tensor.chunks[0], "sizes"), (info, "relative_path"),
        (info, "offset"), (info, "transform_descriptors"), (metadata, "state_dict_metadata"),
    ]  # fmt: skip
    where, name = rng.choice(places)
    object.__setattr__(where, name, value)
    return metadata


def by_reduce(target: Target, rng: random.Random) -> bytes:
    """Return pickled metadata with an object in it that is pickled as a call."""
    touch = f"touch {target.canary}"
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (os.system, (touch,)),
        (eval, (f"__import__('os').system({touch!r})",)),
        (builtins.open, (str(target.canary), "w")),
        (subprocess.run, (["touch", str(target.canary)],)),
    ]
    call = rng.choice(calls)
    return pickle.dumps(with_value(target.metadata(), Harm(call), rng), protocol=rng.choice([2, 3, 4, 5]))


def by_opcodes(target: Target, rng: random.Random) -> bytes:
    """Return pickled metadata with opcodes in it that call something, or such opcodes alone."""
    harm = rng.choice(list(harms(target.canary, rng)))
    if rng.random() < 0.3:
        return b"\x80\x04" + harm + b"."
    # Protocol 2 has no frames, so no lengths change when opcodes are spliced in.
    sound = pickle.dumps(with_value(target.metadata(), PLACE, rng), protocol=2)
    assert text(PLACE) in sound
    return sound.replace(text(PLACE), harm, 1)


def by_bytes(target: Target, rng: random.Random) -> bytes:
    """Return the intact metadata with a few bytes changed, dropped or added."""
    data = bytearray(target.sound)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        data[at : at + rng.choice([0, 1, 1, 1, 4])] = bytes(rng.randrange(256) for _ in range(rng.choice([0, 1, 1, 4])))
    return bytes(data)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    """Checkpoint, while harmful functions are registered as pickle extensions."""
    numbers = (EXTENSION, 0xF1, 0xF1F1)
    for number, module in zip(numbers, ("os", "posix", "subprocess"), strict=True):
        copyreg.add_extension(module, "system" if module != "subprocess" else "getoutput", number)
    yield Target(tmp_path)
    for number, module in zip(numbers, ("os", "posix", "subprocess"), strict=True):
        copyreg.remove_extension(module, "system" if module != "subprocess" else "getoutput", number)


def test_pickles(target: Target) -> None:
    assert target.read()
    attack = Attack("pickles", least=200)
    for number, rng in attack.cases():
        kind = rng.choice([by_reduce, by_opcodes, by_opcodes, by_bytes])
        data = kind(target, rng)
        with attack.case(number, lambda k=kind, d=data: f"{k.__name__}: {d!r}"):
            target.put(data)
            assert not target.read() or kind is by_bytes
    attack.judge()
    for protocol in (2, 3, 4, 5):
        target.put(pickle.dumps(target.metadata(), protocol=protocol))
        assert target.read()


@pytest.mark.parametrize("number", range(60))
def test_every_way_to_call_is_refused(number: int, target: Target) -> None:
    programs = list(harms(target.canary, random.Random(number)))
    target.put(b"\x80\x04" + programs[number % len(programs)] + b".")
    with pytest.raises(ConfigurationError) as refused:
        tensor_shapes(target.path)
    assert refused.value.code == "PT685"
    assert not target.canary.exists()


def test_a_block_that_lies_elsewhere_is_refused(target: Target) -> None:
    """Refused whatever error torch's reader raises for bytes that begin within a block."""
    for moved in (1, 5, 60, 105):
        metadata = target.metadata()
        for info in metadata.storage_data.values():
            info.offset, info.length = info.offset + moved, info.length - moved
        target.put(pickle.dumps(metadata))
        with pytest.raises(ConfigurationError, match="lies where") as refused:
            load_folder(target.path, {name: torch.zeros_like(value) for name, value in target.state.items()})
        assert refused.value.code == "PT685"
