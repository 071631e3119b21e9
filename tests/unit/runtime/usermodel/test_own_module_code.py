"""A plan holds the hash of every file of the user's code that runs, and no other code runs in the ranks."""

from __future__ import annotations

import os
import py_compile
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_own_module import NET

from partool.catalog import transformers_process
from partool.plan.types import ModuleModel
from partool.spec.model_code import changed_files, file_of_module
from partool_runtime.errors import ConfigurationError
from partool_runtime.usermodel.building import build_module, user_code
from partool_runtime.usermodel.code import UserCode
from partool_runtime.usermodel.structure import describe

FILES = {
    "nets/__init__.py": "from . import sizes\n",
    "nets/sizes.py": "import helper\nwidth = helper.width\n",
    "nets/model.py": "from . import sizes\n" + NET.replace("width=64", "width=sizes.width"),
    "helper.py": "width = 64\n",
    "unused.py": "raise SystemExit('this is not imported')\n",
    "space/inner.py": "",  # in a namespace: a package without a file of its own
}  # fmt: skip
LOADED = ["helper.py", "nets/__init__.py", "nets/model.py", "nets/sizes.py"]


@pytest.fixture(autouse=True)
def _fresh_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import as a new process does."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, UserCode)])
    yield
    forget()


def forget() -> None:
    """Forget the modules of these tests, as a new process has not imported them."""
    tops = ("nets", "helper", "unused", "space", "archived", "extras")
    for name in [each for each in sys.modules if each.partition(".")[0] in tops]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a package, a module beside it, and a module that is not used."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def recorded(folder: Path, module: str = "nets.model:Net") -> ModuleModel:
    """Return the plan's record of a module, with the files that building it loads."""
    model = ModuleModel(module=module, config={"layers": 2}, folder=str(folder))
    code = user_code(model, recorded=True)
    build_module(model, code)
    forget()
    return model.model_copy(update={"files": code.files})


def refused(model: ModuleModel) -> ConfigurationError:
    """Return the error with which a rank refuses a model."""
    with pytest.raises(ConfigurationError) as raised:
        build_module(model)
    return raised.value


def test_all_files_that_run_are_recorded(folder: Path) -> None:
    model = recorded(folder)
    assert sorted(model.files) == LOADED
    assert changed_files(model.files, str(folder)) == []
    assert build_module(model) is not None
    forget()
    assert build_module(ModuleModel.model_validate_json(model.model_dump_json())) is not None


@pytest.mark.parametrize("name", LOADED)
def test_a_changed_file_is_named_and_nothing_runs(folder: Path, name: str) -> None:
    model = recorded(folder)
    (folder / name).write_text(f"import os\nos.environ['PARTOOL_TEST_RAN'] = '1'\n{FILES[name]}", encoding="utf-8")
    error = refused(model)
    assert error.code == "PT591"
    assert error.message == f"{name} is not the one that was allowed when the plan was made"
    assert "PARTOOL_TEST_RAN" not in os.environ


def test_a_file_that_takes_anothers_place_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module on the module path, and one of the same name that appears in the folder of the spec."""
    other = folder / "elsewhere"
    other.mkdir()
    (folder / "helper.py").rename(other / "helper.py")
    monkeypatch.syspath_prepend(str(other))
    model = recorded(folder)
    assert sorted(model.files) == LOADED
    (folder / "helper.py").write_text("width = 32\n", encoding="utf-8")
    assert refused(model).message == "helper.py is not the one that was allowed when the plan was made"


def test_a_module_that_was_not_loaded_is_refused(folder: Path) -> None:
    (folder / "helper.py").write_text(
        "import os\nif os.environ.get('PARTOOL_TEST_MORE'):\n    import unused\nwidth = 64\n"
    )
    model = recorded(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PARTOOL_TEST_MORE", "1")
        error = refused(model)
    assert (error.code, error.message) == ("PT591", "the file unused.py was not loaded when the plan was made")


class Editable(MetaPathFinder):
    """Finds the package ``extras`` in a checkout, as the finder of an editable installation does."""

    def __init__(self, checkout: Path) -> None:
        self.package = checkout / "extras"
        self.package.mkdir(parents=True)
        (self.package / "__init__.py").write_text("", encoding="utf-8")
        (self.package / "late.py").write_text("scale = 1.0\n", encoding="utf-8")

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "extras":
            return None
        places = [str(self.package)]
        return spec_from_file_location(name, self.package / "__init__.py", submodule_search_locations=places)


def test_imports_inside_of_the_forward_pass_are_recorded_and_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Modules of an editable package, which lies neither in the spec's folder nor on the module path."""
    editable = Editable(tmp_path_factory.mktemp("checkout"))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, editable])
    late = "class Late(Net):\n    def forward(self, tokens):\n        from extras.late import scale\n"
    late += "        return super().forward(tokens) * scale\n"
    (folder / "nets" / "model.py").write_text(FILES["nets/model.py"] + late, encoding="utf-8")
    model = ModuleModel(module="nets.model:Late", config={"layers": 1}, folder=str(folder))
    model = model.model_copy(update={"files": describe(model.model_dump_json(), 16)["code_files"]})
    assert sorted(model.files) == ["extras/__init__.py", "extras/late.py", *LOADED]
    forget()
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    rank = build_module(model).to_empty(device="cpu")
    assert rank(tokens).shape == (1, 4, 300)
    forget()
    (editable.package / "late.py").write_text("scale = 2.0\n", encoding="utf-8")
    rank = build_module(model).to_empty(device="cpu")
    with pytest.raises(ConfigurationError, match=r"extras/late\.py is not the one that was allowed") as changed:
        rank(tokens)
    assert changed.value.code == "PT591"
    forget()
    files = {name: digest for name, digest in model.files.items() if name != "extras/late.py"}
    rank = build_module(model.model_copy(update={"files": files})).to_empty(device="cpu")
    with pytest.raises(ConfigurationError, match=r"extras/late\.py was not loaded when the plan was made"):
        rank(tokens)


def test_compiled_files_beside_the_source_do_not_run(folder: Path) -> None:
    """``__pycache__`` has no hash: a planted file there, with the size and the time of the source, is not read."""
    model = recorded(folder)
    source, evil = folder / "helper.py", folder / "evil.py"
    evil.write_text("width = 8 \n", encoding="utf-8")
    status = source.stat()
    os.utime(evil, ns=(status.st_atime_ns, status.st_mtime_ns))
    cached = Path(sys.modules["importlib.util"].cache_from_source(str(source)))
    py_compile.compile(str(evil), cfile=str(cached), dfile=str(source))
    assert build_module(model).get_submodule("embed").weight.shape[1] == 64  # type: ignore[union-attr,index]


def test_files_without_source_and_namespaces(folder: Path) -> None:
    py_compile.compile(str(folder / "helper.py"), cfile=str(folder / "helper.pyc"))
    (folder / "helper.py").unlink()
    (folder / "nets" / "sizes.py").write_text("import helper, space.inner\nwidth = helper.width\n", encoding="utf-8")
    model = recorded(folder)
    assert sorted(model.files) == ["helper.pyc", *LOADED[1:], "space/inner.py"]
    (folder / "space" / "inner.py").write_text("width = 3\n", encoding="utf-8")
    assert refused(model).message.startswith("space/inner.py is not the one")


def test_archives_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(folder / "code.zip", "w") as archive:
        archive.writestr("archived.py", "width = 64\n")
    monkeypatch.syspath_prepend(str(folder / "code.zip"))
    (folder / "helper.py").write_text("from archived import width\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"archived of .*code\.zip.* is loaded by zipimporter") as raised:
        recorded(folder)
    assert raised.value.code == "PT655"


def test_an_installed_package_is_recorded_if_the_spec_names_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "venv" / "site-packages"
    place.mkdir(parents=True)
    for name in ("nets", "helper.py"):
        (folder / name).rename(place / name)
    monkeypatch.syspath_prepend(str(place))
    assert sorted(recorded(folder).files) == ["nets/__init__.py", "nets/model.py", "nets/sizes.py"]


def test_kept_descriptions_are_those_of_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a file that is not imported asks for nothing, a change of one that is asks again."""
    asked: list[str] = []

    def answer(module: str, *arguments: str) -> dict[str, Any]:
        asked.append(module)
        return {"code_files": recorded(folder).files}

    monkeypatch.setenv("PARTOOL_HOME", str(folder / "home"))
    monkeypatch.setattr(transformers_process, "_answer", answer)
    monkeypatch.setattr(transformers_process, "code_allowed", lambda: True)
    model = {"module": "nets.model:Net", "config": {"layers": 2}, "folder": str(folder)}
    first = transformers_process.describe_module(model, 64)
    (folder / "unused.py").write_text("", encoding="utf-8")
    assert transformers_process.describe_module(model, 64) == first
    assert len(asked) == 1
    (folder / "helper.py").write_text("width = 32\n", encoding="utf-8")
    assert transformers_process.describe_module(model, 64) != first
    assert len(asked) == 2


def test_names_of_files() -> None:
    assert file_of_module("a.b", Path("/x/a/b.py"), package=False) == "a/b.py"
    assert file_of_module("a.b", Path("/x/a/b/__init__.py"), package=True) == "a/b/__init__.py"
    assert file_of_module("a", Path("/x/a.cpython-311-x86_64-linux-gnu.so"), package=False) == "a.so"
