"""Checkpoints of one process: nothing is lost, whatever fails and wherever the process dies."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from often import often

from partool_runtime.checkpoint import (
    Checkpointer,
    CheckpointError,
    _manifest,
    load_folder,
    load_newest,
    newest_step,
    read_manifest,
    step_folder,
    tensor_shapes,
)
from partool_runtime.checkpoint._files import Files, FolderLock
from partool_runtime.errors import ConfigurationError
from partool_runtime.resuming import falls_back

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def state_of(step, rows=7):
    generator = torch.Generator().manual_seed(step)
    return {
        "model.a.weight": torch.randn(rows, 5, generator=generator, dtype=torch.float64),
        "model.empty": torch.zeros(0, 3),
        "exp_avg.a.weight": torch.randn(rows, 5, generator=generator).to(torch.bfloat16),
        "exp_avg.scale": torch.tensor(step + 0.5),
    }


def open_folder(folder, *, keep=2, mode="sync", files=None):
    return Checkpointer(folder, keep=keep, mode=mode, rank=0, world_size=1, files=files)


def blank(state):
    return {name: torch.full_like(value, 99) for name, value in state.items()}


def same_bits(a, b):
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def assert_loads(checkpointer, step):
    found = blank(state_of(step))
    assert checkpointer.load(step, found) == {"step": step, "loss": 0.1}
    assert same_bits(found, state_of(step))


def save(checkpointer, step, **options):
    checkpointer.save(step, state_of(step), {"step": step, "loss": 0.1}, **options)


def save_little(checkpointer, step):
    checkpointer.save(step, {"model.a": torch.full((3,), step)}, {})


def assert_loads_little(checkpointer, step):
    found = {"model.a": torch.zeros(3, dtype=torch.int64)}
    checkpointer.load(step, found)
    assert found["model.a"].tolist() == [step] * 3


def names(folder):
    return sorted(entry.name for entry in folder.iterdir() if entry.name != ".lock")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_round_trip_retention_and_stats(tmp_path, mode):
    folder = tmp_path / "made" / "on the way"
    checkpointer = open_folder(folder, mode=mode)
    assert checkpointer.steps() == []
    for step in (3, 10, 200):
        save(checkpointer, step)
    assert checkpointer.steps()[0] == 200
    assert names(folder) == ["step-00000010", "step-00000200"]
    assert_loads(checkpointer, 200)
    assert_loads(checkpointer, 10)
    stats = checkpointer.last_write
    files = [entry for entry in step_folder(folder, 200).iterdir() if entry.name != "manifest.json"]
    assert (stats.step, stats.path) == (200, str(folder / "step-00000200"))
    assert stats.bytes == sum(file.stat().st_size for file in files) > 7 * 5 * (8 + 2)
    assert stats.write_s > 0
    assert stats.blocked_s > 0
    checkpointer.close()


def test_async_save_copies_before_it_returns(tmp_path):
    class Slow(Files):
        def open_new(self, path):
            assert changed.wait(20)
            return super().open_new(path)

    changed = threading.Event()
    checkpointer = open_folder(tmp_path, mode="async", files=Slow())
    state = state_of(1)
    state["model.view"] = torch.arange(12.0).view(3, 4)[:, 1:3]
    expected = {name: value.clone() for name, value in state.items()}
    checkpointer.save(1, state, {})
    for value in state.values():
        value.add_(1)
    assert newest_step(tmp_path) is None
    changed.set()
    checkpointer.wait()
    found = blank(expected)
    checkpointer.load(1, found)
    assert same_bits(found, expected)
    assert not same_bits(found, state)
    checkpointer.close()


def test_load_fills_the_given_tensors_in_place_and_groups_may_be_left_out(tmp_path):
    checkpointer = open_folder(tmp_path)
    save(checkpointer, 4)
    checkpointer.close()
    weight = torch.nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))
    only = {"model.a.weight": weight, "model.empty": torch.ones(0, 3)}
    assert load_folder(step_folder(tmp_path, 4), only)["step"] == 4
    assert torch.equal(weight, state_of(4)["model.a.weight"])
    assert tensor_shapes(step_folder(tmp_path, 4))["model.a.weight"] == ((7, 5), torch.float64)


class Crash(BaseException):
    """The process is gone; not an Exception, so that no clean-up runs."""


class Crashing(Files):
    """File operations that count and crash at one of them; all later operations do nothing."""

    def __init__(self, die_at=None):
        self.count = 0
        self.die_at = die_at

    def __getattribute__(self, name):
        value = object.__getattribute__(self, name)
        if name.startswith("_") or not callable(value) or name == "free_bytes":
            return value

        def counted(*arguments):
            self.count += 1
            if self.die_at is not None and self.count >= self.die_at:
                if self.count == self.die_at:
                    half_done(name, arguments)
                raise Crash
            return value(*arguments)

        return counted


def half_done(name, arguments):
    """Leave the partial result of a process killed inside an operation."""
    if name == "remove_folder" and arguments[0].exists():
        for file in sorted(arguments[0].iterdir())[::2]:
            file.unlink()
    elif name == "write":
        stream, data = arguments
        stream.write(data[: len(data) // 2])
        stream.flush()


@pytest.mark.parametrize("scenario", often(["next", "same step again", "earlier step"], ["same step again"]))
def test_a_crash_at_any_operation_leaves_whole_checkpoints(tmp_path, scenario):
    step = {"next": 30, "same step again": 20, "earlier step": 15}[scenario]
    template = tmp_path / "template"
    first = open_folder(template)
    save(first, 10)
    save(first, 20)
    first.close()
    counter = Crashing()
    operations = crash(shutil.copytree(template, tmp_path / "count"), step, counter)
    assert operations is None
    assert counter.count > 10
    outcomes = set()
    for die_at in range(1, counter.count + 1):
        folder = shutil.copytree(template, tmp_path / f"{die_at}")
        assert crash(folder, step, Crashing(die_at)) is Crash
        later = open_folder(folder)
        assert later.steps()[0] in {10, 20, step}
        outcomes.add(later.steps()[0])
        assert_loads(later, later.steps()[0])
        assert all(name.startswith("step-") and name.count(".") <= name.count(".aside") for name in names(folder))
        save(later, 40)
        assert_loads(later, 40)
        later.close()
        shutil.rmtree(folder)
    assert outcomes >= {20, step} if scenario != "earlier step" else {15, 20} <= outcomes


def crash(folder, step, files):
    """Save in a simulated process that crashes; return the Crash, if any."""
    try:
        checkpointer = open_folder(folder, files=files)
    except Crash:
        return Crash
    try:
        save(checkpointer, step)
    except Crash:
        return Crash
    finally:
        checkpointer._lock.release()  # like the kernel
    return None


def test_going_on_from_an_earlier_step_sets_later_ones_aside(tmp_path):
    checkpointer = open_folder(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(checkpointer, step)
    save(checkpointer, 2)
    assert checkpointer.steps()[0] == 2
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003.aside"]
    save(checkpointer, 3)
    save(checkpointer, 2)
    assert "step-00000003.aside2" in names(tmp_path)
    checkpointer.close()


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file):
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", [flip, truncate, os.remove])
def test_damage_is_named_and_nothing_is_lost(tmp_path, name, damage):
    checkpointer = open_folder(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(checkpointer, step)
    before = names(tmp_path)
    damage(step_folder(tmp_path, 3) / name)
    damage(step_folder(tmp_path, 2) / name)
    assert checkpointer.steps()[0] == 3  # never silently an older one
    state = blank(state_of(3))
    with pytest.raises(ConfigurationError) as caught:
        checkpointer.load(3, state)
    assert caught.value.code == "PT611"
    assert str(step_folder(tmp_path, 3) / name) in caught.value.message
    assert same_bits(state, blank(state_of(3)))
    assert names(tmp_path) == before
    assert caught.value.help == "step 1 is intact; to go on from it: partool launch --resume last --step 1"
    assert_loads(checkpointer, 1)
    checkpointer.close()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_a_run_nobody_attends_falls_back_to_the_newest_intact_checkpoint(tmp_path, name):
    checkpointer = open_folder(tmp_path, keep=4)
    for step in (1, 2, 3, 4):
        save(checkpointer, step)
    for step in (3, 4):
        flip(step_folder(tmp_path, step) / name)
    content = {file: file.read_bytes() for file in step_folder(tmp_path, 4).iterdir()}
    state = blank(state_of(3))

    def load(step, advise):
        checkpointer.load(step, state, advise=advise)

    with pytest.raises(ConfigurationError, match=r"PT611.*step-00000004.*\n.*step 2 is intact"):
        load_newest(checkpointer, load, fallback=False)
    assert names(tmp_path) == [f"step-{step:08}" for step in (1, 2, 3, 4)]
    resumed = load_newest(checkpointer, load, fallback=True)
    assert resumed.step == 2
    assert same_bits(state, state_of(2))
    aside = ["step-00000003.aside", "step-00000004.aside"]
    assert names(tmp_path) == ["step-00000001", "step-00000002", *aside]
    assert {file: (tmp_path / aside[1] / file.name).read_bytes() for file in content} == content
    for note, step, kept in zip(resumed.notes, (4, 3), reversed(aside), strict=True):
        assert note.startswith(f"PT659: the checkpoint of step {step} is skipped and kept as {kept}, as ")
        assert name in note
        assert note.endswith("training goes on from step 2")
    assert load_newest(checkpointer, load, fallback=False).notes == ()
    checkpointer.close()


def test_without_an_intact_checkpoint_nothing_is_renamed_or_begun_anew(tmp_path):
    checkpointer = open_folder(tmp_path, keep=2)
    assert load_newest(checkpointer, lambda step, advise: None, fallback=True).step == 0
    for step in (1, 2):
        save(checkpointer, step)
        flip(step_folder(tmp_path, step) / "__0_0.distcp")
    before = names(tmp_path)

    def load(step, advise):
        checkpointer.load(step, blank(state_of(1)), advise=advise)

    with pytest.raises(ConfigurationError, match=r"PT611.*step-00000002.*\n.*no intact checkpoint to fall back to"):
        load_newest(checkpointer, load, fallback=True)
    assert names(tmp_path) == before
    checkpointer.close()


def test_a_file_server_that_fails_is_no_damage(tmp_path, monkeypatch):
    checkpointer = open_folder(tmp_path, keep=2)
    for step in (1, 2):
        save(checkpointer, step)
    before = names(tmp_path)

    def stale(file):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(file))

    def load(step, advise):
        checkpointer.load(step, blank(state_of(1)), advise=advise)

    monkeypatch.setattr(_manifest, "file_digest", stale)
    with pytest.raises(CheckpointError, match=r"step-00000002.*cannot be read: Stale"):
        load_newest(checkpointer, load, fallback=True)
    monkeypatch.undo()
    assert names(tmp_path) == before
    assert load_newest(checkpointer, load, fallback=True).step == 2
    checkpointer.close()


def test_a_checkpoint_of_another_version_is_no_damage(tmp_path):
    checkpointer = open_folder(tmp_path, keep=2)
    for step in (1, 2):
        save(checkpointer, step)
    file = step_folder(tmp_path, 2) / "manifest.json"
    body = json.loads(file.read_text())["manifest"] | {"version": 9}
    file.write_text(json.dumps({"manifest": body, "checksum": _manifest._checksum(body)}))
    before = names(tmp_path)

    def load(step, advise):
        checkpointer.load(step, blank(state_of(1)), advise=advise)

    with pytest.raises(ConfigurationError, match=r"PT617.*version 9"):
        load_newest(checkpointer, load, fallback=True)
    assert names(tmp_path) == before
    checkpointer.close()


def test_only_damage_is_fallen_back_from(tmp_path):
    checkpointer = open_folder(tmp_path, keep=2)
    for step in (1, 2):
        save(checkpointer, step)

    def load(step, advise):
        raise ConfigurationError("PT612", "another model")

    with pytest.raises(ConfigurationError, match="PT612"):
        load_newest(checkpointer, load, fallback=True)
    checkpointer.close()


@pytest.mark.parametrize(
    ("setting", "target", "environment", "wanted"),
    [
        ("auto", "local", {}, False),
        ("auto", "local", {"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ("auto", "local", {"TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ("auto", "torchrun", {"SLURM_RESTART_COUNT": "3"}, False),
        ("auto", "slurm", {}, False),
        ("auto", "slurm", {"SLURM_RESTART_COUNT": "0"}, False),
        ("auto", "slurm", {"SLURM_RESTART_COUNT": "1"}, True),
        ("auto", "k8s", {}, True),
        (True, "local", {}, True),
        (False, "k8s", {"TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)
def test_who_may_fall_back(setting, target, environment, wanted):
    assert falls_back(setting, target, environment) is wanted


def test_damage_without_an_older_checkpoint(tmp_path):
    checkpointer = open_folder(tmp_path)
    save(checkpointer, 5)
    flip(step_folder(tmp_path, 5) / "__0_0.distcp")
    with pytest.raises(ConfigurationError, match=r"PT611.*\n.*no older intact") as caught:
        checkpointer.load(5, blank(state_of(5)))
    assert "checksum" in caught.value.message
    checkpointer.close()


def test_metadata_is_never_unpickled_unless_the_manifest_vouches_for_it(tmp_path):
    checkpointer = open_folder(tmp_path)
    save(checkpointer, 5)
    checkpointer.close()
    marker = tmp_path / "ran"
    metadata = step_folder(tmp_path, 5) / ".metadata"
    size = metadata.stat().st_size
    program = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    metadata.write_bytes(program + b" " * (size - len(program)))
    with pytest.raises(ConfigurationError, match="PT611"):
        load_folder(step_folder(tmp_path, 5), blank(state_of(5)))
    assert not marker.exists()


def test_missing_and_other_models(tmp_path):
    checkpointer = open_folder(tmp_path)
    save(checkpointer, 5)
    with pytest.raises(ConfigurationError, match="PT610") as missing:
        checkpointer.load(6, blank(state_of(5)))
    assert "steps 5" in missing.value.help
    other = blank(state_of(5, rows=8))
    other["exp_avg.scale"] = torch.tensor(0, dtype=torch.int64)
    other["model.new"] = other.pop("model.empty")
    with pytest.raises(ConfigurationError, match="PT612") as mismatch:
        checkpointer.load(5, other)
    for part in (
        "model.a.weight is float64[7, 5] in the checkpoint and float64[8, 5] here",
        "exp_avg.scale is float32[] in the checkpoint and int64[] here",
        "model.empty is only in the checkpoint",
        "model.new is not in the checkpoint",
    ):
        assert part in mismatch.value.message
    checkpointer.close()


def test_moments_of_another_type_are_converted_and_weights_are_not(tmp_path):
    checkpointer = open_folder(tmp_path)
    save(checkpointer, 5)
    saved, found = state_of(5), blank(state_of(5))
    found["exp_avg.a.weight"] = found["exp_avg.a.weight"].float()
    found["exp_avg.scale"] = found["exp_avg.scale"].to(torch.bfloat16)
    checkpointer.load(5, found)
    assert torch.equal(found["exp_avg.a.weight"], saved["exp_avg.a.weight"].float())
    assert torch.equal(found["exp_avg.scale"], saved["exp_avg.scale"].to(torch.bfloat16))
    assert torch.equal(found["model.a.weight"], saved["model.a.weight"])
    found["model.a.weight"] = found["model.a.weight"].float()
    with pytest.raises(ConfigurationError, match=r"PT612.*float64\[7, 5\] in the checkpoint and float32\[7, 5\]"):
        checkpointer.load(5, found)
    checkpointer.close()


class Failing(Files):
    """A file system that is full, or broken, after some bytes."""

    def __init__(self, error, after_bytes=0):
        self.error = error
        self.left = after_bytes
        self.working = True

    def write(self, stream, data):
        self.left -= len(data)
        if not self.working and self.left < 0:
            raise OSError(self.error, os.strerror(self.error))
        super().write(stream, data)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("after_bytes", [0, 900, 4000])
@pytest.mark.parametrize("number", [*FULL_DISK, errno.EIO])
def test_errors_while_writing_leave_everything_as_it_was(tmp_path, mode, after_bytes, number):
    files = Failing(number)
    checkpointer = open_folder(tmp_path, mode=mode, files=files)
    save(checkpointer, 1, wait=True)
    stats = checkpointer.last_write
    files.working, files.left = False, after_bytes
    state = state_of(2)
    with pytest.raises((ConfigurationError, CheckpointError)) as caught:
        checkpointer.save(2, state, {"step": 2}, wait=True)
    if number in FULL_DISK:
        assert caught.value.code == "PT613"
        assert "(354 of state, " in caught.value.message  # 7*5*(8+2) + 4
        assert os.strerror(number) in caught.value.message
        assert "bytes free" in caught.value.message
    else:
        assert isinstance(caught.value, CheckpointError)
        assert os.strerror(number) in str(caught.value)
    assert same_bits(state, state_of(2))
    assert names(tmp_path) == ["step-00000001"]
    assert checkpointer.last_write is stats
    files.working = True
    assert_loads(checkpointer, 1)
    save(checkpointer, 3, wait=True)
    assert_loads(checkpointer, 3)
    checkpointer.close()


def test_a_failed_background_write_is_raised_by_the_next_call_and_once(tmp_path):
    files = Failing(errno.ENOSPC)
    files.working = False
    checkpointer = open_folder(tmp_path, mode="async", files=files)
    save(checkpointer, 1)
    with pytest.raises(ConfigurationError, match="PT613"):
        save(checkpointer, 2)
    checkpointer.wait()
    checkpointer.close()


def test_free_space_is_looked_at_before_writing(tmp_path):
    class Small(Files):
        def free_bytes(self, path):
            return 123456

        def open_new(self, path):
            raise AssertionError("nothing may be written")

    checkpointer = open_folder(tmp_path, files=Small())
    with pytest.raises(
        ConfigurationError,
        match=r"PT613.*needs 1,048,930 bytes \(354 of state, 1,048,576 to describe it\).*123,456 bytes free",
    ):
        save(checkpointer, 1)
    assert names(tmp_path) == []
    checkpointer.close()


def test_a_real_limit_of_the_operating_system(tmp_path):
    checkpointer = open_folder(tmp_path)
    save(checkpointer, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {"model.a": torch.ones(300_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(ConfigurationError, match="PT613"):
            checkpointer.save(2, big, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["step-00000001"]
    assert_loads(checkpointer, 1)
    checkpointer.close()


def test_leftovers_of_a_dead_run_go_but_nothing_else(tmp_path):
    checkpointer = open_folder(tmp_path)
    save(checkpointer, 7)
    checkpointer.close()
    for name in ("step-00000008.tmp", "step-00000006.trash", "step-00000007.old", "notes.tmp", "step-00000009.aside"):
        shutil.copytree(step_folder(tmp_path, 7), tmp_path / name)
    (tmp_path / "step-x").mkdir()
    shutil.move(step_folder(tmp_path, 7), tmp_path / "step-00000005.old")
    later = open_folder(tmp_path)
    assert names(tmp_path) == ["notes.tmp", "step-00000005", "step-00000007", "step-00000009.aside", "step-x"]
    assert later.steps()[0] == 7
    later.close()


def test_a_checkpoint_that_cannot_be_deleted_does_not_end_the_run(tmp_path, caplog):
    class Sticky(Files):
        def remove_folder(self, path):
            if path.name.endswith(".trash") and path.exists():
                raise PermissionError(errno.EACCES, "no")
            super().remove_folder(path)

    checkpointer = open_folder(tmp_path, keep=1, files=Sticky())
    with caplog.at_level(logging.WARNING):
        save(checkpointer, 1)
        save(checkpointer, 2)
    assert "cannot delete" in caplog.text
    assert checkpointer.steps()[0] == 2
    checkpointer.close()


def test_a_second_run_may_not_write_into_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("partool_runtime.checkpoint.checkpointer._LOCK_WAIT_S", 0.2)
    program = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"1\n"
        with pytest.raises(ConfigurationError, match="PT614"):
            open_folder(tmp_path)
        other.kill()  # the lock is released when its holder dies
        other.wait(10)
        open_folder(tmp_path).close()
    lock = FolderLock(tmp_path)
    assert lock.acquire()
    lock.release()


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="PT615"):
        open_folder(tmp_path / "file" / "below")


def test_the_manifest_says_what_is_there(tmp_path):
    checkpointer = open_folder(tmp_path)
    save(checkpointer, 5)
    with pytest.raises(TypeError):
        checkpointer.save(6, state_of(6), {"not json": object()})
    checkpointer.close()
    manifest = read_manifest(step_folder(tmp_path, 5))
    assert (manifest.step, manifest.extra["loss"], manifest.torch_version) == (5, 0.1, torch.__version__)
    document = json.loads((step_folder(tmp_path, 5) / "manifest.json").read_text())
    document["manifest"]["version"] = 2
    (step_folder(tmp_path, 5) / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match="PT611"):
        read_manifest(step_folder(tmp_path, 5))
