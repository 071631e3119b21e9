"""Compiled code is kept, and loaded, only where no other user can write; planted files are not loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from partool_runtime import private
from partool_runtime.dry import shim
from partool_runtime.errors import ConfigurationError
from partool_runtime.private import (
    INDUCTOR_CACHE,
    NotPrivateError,
    keep_compiled_code_private,
    kept_file,
    private_folder,
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder of this user that only this user can write to."""
    tmp_path.chmod(0o700)
    return tmp_path


def write(text: str, made: list[Path]) -> object:
    """Return a function that writes ``text`` and notes where."""

    def make(path: Path) -> None:
        made.append(path)
        path.write_text(text, encoding="utf-8")

    return make


def test_a_folder_is_made_private(place: Path) -> None:
    folder = private_folder(place / "new" / "dry")
    assert folder == place / "new" / "dry"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert private_folder(folder).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(place: Path, mode: int) -> None:
    (place / "dry").mkdir()
    (place / "dry").chmod(mode)
    with pytest.raises(NotPrivateError, match=f"other users can write.*{mode:04o}"):
        private_folder(place / "dry")


def test_links_and_files_are_refused(place: Path) -> None:
    (place / "real").mkdir(mode=0o700)
    (place / "link").symlink_to(place / "real")
    (place / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(NotPrivateError, match="a link or a file"):
            private_folder(place / name)
    assert private_folder(place / "link" / "dry") == place / "real" / "dry"  # where the link leads is looked at


def test_a_folder_above_that_others_can_write_to_is_refused_unless_it_is_sticky(place: Path) -> None:
    above = place / "shared"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(NotPrivateError, match="shared"):
        private_folder(above / "inside" / "dry")
    above.chmod(0o1777)
    assert private_folder(above / "inside" / "dry").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_folders_of_another_user_are_refused(place: Path) -> None:
    (place / "dry").mkdir(mode=0o700)
    os.chown(place / "dry", 12345, 12345)
    with pytest.raises(NotPrivateError, match="belongs to the user 12345"):
        private_folder(place / "dry")
    with pytest.raises(NotPrivateError, match="belongs to the user 12345, who can replace"):
        private_folder(place / "dry" / "inside")


def test_a_group_of_one_may_write_above(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With umask 002 the folders of a user are open to a group of the user's own number."""
    above = place / "home"
    above.mkdir()
    above.chmod(0o775)
    monkeypatch.setattr(private.os, "getegid", lambda: above.stat().st_gid)
    monkeypatch.setattr(private.os, "geteuid", lambda: above.stat().st_uid)
    same = above.stat().st_gid == above.stat().st_uid
    if same:
        assert private_folder(above / "dry").is_dir()
    monkeypatch.setattr(private.os, "getegid", lambda: above.stat().st_gid + 1)
    with pytest.raises(NotPrivateError, match="other users can write"):
        private_folder(above / "dry")


def test_a_file_is_kept_by_its_content(place: Path) -> None:
    folder, made = private_folder(place / "dry"), list[Path]()
    first = kept_file(folder, "shim-1", ".so", write("code", made))  # type: ignore[arg-type]
    assert kept_file(folder, "shim-1", ".so", write("code", made)) == first  # type: ignore[arg-type]
    assert len(made) == 1
    assert made[0].parent != folder  # it gets its name when it is complete
    assert [each.name for each in folder.iterdir()] == [first.name]
    first.write_text("other code", encoding="utf-8")
    assert kept_file(folder, "shim-1", ".so", write("code", made)).read_text(encoding="utf-8") == "code"  # type: ignore[arg-type]
    assert len(made) == 2


@pytest.mark.parametrize("how", ["name", "mode", "owner", "link"])
def test_a_planted_file_is_not_taken(place: Path, how: str) -> None:
    """A library from the time when the folder was open to all, under the name that the right one would have."""
    folder, made = private_folder(place / "dry"), list[Path]()
    right = kept_file(folder, "shim-1", ".so", write("code", made))  # type: ignore[arg-type]
    if how == "name":
        right.rename(folder / "shim-1-0123456789abcdef.so")
    elif how == "mode":
        right.chmod(0o666)
    elif how == "link":
        right.rename(place / "elsewhere.so")
        right.symlink_to(place / "elsewhere.so")
    elif os.geteuid() != 0:
        pytest.skip("only root can give files away")
    else:
        os.chown(right, 12345, 12345)
    kept = kept_file(folder, "shim-1", ".so", write("code", made))  # type: ignore[arg-type]
    assert len(made) == 2
    assert kept.stat().st_mode & 0o777 == 0o600
    assert not kept.is_symlink()


def test_the_stand_in_for_cuda_takes_the_first_private_folder(place: Path) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    assert shim._private([place / "open" / "dry", place / "mine" / "dry"]) == place / "mine" / "dry"
    with pytest.raises(ConfigurationError, match=r"other users can write to .*open") as refused:
        shim._private([place / "open" / "dry"])
    assert refused.value.code == "PT516"


def test_what_torch_compiles_is_kept_in_a_private_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.tempfile, "tempdir", str(place))
    mine, environment = place / f"partool-{os.geteuid()}", dict[str, str]()
    keep_compiled_code_private(environment)
    assert environment == {INDUCTOR_CACHE: str(mine / "inductor")}
    assert mine.stat().st_mode & 0o777 == 0o700
    mine.chmod(0o777)  # as another user would have made it
    other = dict[str, str]()
    keep_compiled_code_private(other)
    assert Path(other[INDUCTOR_CACHE]).parent.parent == place
    assert Path(other[INDUCTOR_CACHE]).parent != mine
    assert Path(other[INDUCTOR_CACHE]).parent.stat().st_mode & 0o777 == 0o700
    named = {INDUCTOR_CACHE: "/shared/cache"}
    keep_compiled_code_private(named)
    assert named == {INDUCTOR_CACHE: "/shared/cache"}
