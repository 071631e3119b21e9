"""The import table of docs/design/architecture.md, checked against every module's imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _layers import KERNEL_LAYERS, LAYERS, RUNTIME_LAYERS, level_of, upward
from house import cycles, executed, graph, import_lines, imported_names, modules, shared_names

from partool.process import python_command

ROOT = Path(__file__).parents[3]
RANK = {name: level for level, names in enumerate(LAYERS) for name in names}
AT_TOP = {"__init__", "__main__", "process", "version"}
"""Modules of ``partool`` without a layer; ``process`` and ``version`` may be imported by every package."""
DATA = {"templates", "specs"}
"""Folders that an installed ``partool`` holds beside its packages: data, without modules."""
RUNTIME_MAY_IMPORT = {"strategies", "spec", "layout", "schedule", "plan", "process"}
HEAVY = {"torch", "transformers", "safetensors", "tokenizers", "tensorboard", "wandb", "mlflow", "trackio"}
OF_CLUSTERS = {"kubernetes", "kubernetes_validate", "jsonschema", "celpy"}
"""Packages that only ``partool.launch`` imports, inside the functions that query a cluster or check a manifest."""


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield (module, line, at module level) of every import of a file, type-checking blocks left out.

    ``from module import name`` gives the module before its names.
    """
    before = None
    for one in import_lines(path):
        if not one.typing:
            if one.name != one.module and before != (one.module, one.line):
                yield one.module, one.line, one.at_top
            before = (one.module, one.line)
            yield one.name, one.line, one.at_top


def violations(package: Path, name: str, root: Path = ROOT) -> list[str]:
    """Return what a package or module of ``partool`` imports of higher layers, the runtime and heavy packages."""
    found = []
    for path in sorted(package.rglob("*.py")) or [package.with_suffix(".py")]:
        for module, line, at_top in imports(path):
            parts = module.split(".")
            where = f"{path.relative_to(root)}:{line}"
            if parts[0] in OF_CLUSTERS and (at_top or name != "launch"):
                found.append(f"{where} imports {module}")
            kernels = parts[0] == "partool_kernels" and parts[1:2] != ["registry"]
            if parts[0] in HEAVY | {"partool_runtime"} or kernels:
                found.append(f"{where} imports {module}")
            other = parts[1] if parts[0] == "partool" and len(parts) > 1 else name
            if other not in {*RANK, *AT_TOP, "__version__"}:
                found.append(f"{where} imports {module}, which has no layer")
            if RANK.get(other, -1) > RANK[name]:
                found.append(f"{where} imports {module} from a higher layer")
            if other != name and other in LAYERS[RANK[name]]:
                found.append(f"{where} imports {module} from a layer beside it")
    return found


INSIDE = {
    "cost": [[""], ["training"]],
    "planner": [
        ["described", "evidence", "stopping", "allocator"],
        ["problem"],
        ["hf", "kernels"],
        ["cost_job"],
        ["forms"],
        ["rules"],
        ["resolve"],
        ["search"],
        ["findings"],
        ["explain"],
        ["elastic", "totals", "queries", "longest", "tuning"],
        ["make"],
        ["__init__"],
    ],
}
"""Order of the parts of a package, lowest first; the name "" stands for all other modules of the package."""
TRAINING = "partool.work.training"
"""Input of prices of training, which the other prices must not read."""


def upward_inside(package: Path, name: str, levels: list[list[str]]) -> list[str]:
    """Return the imports of a file of ``partool/<name>`` from a part of the package that is higher."""
    rank = {part: level for level, parts in enumerate(levels) for part in parts}
    found = []
    for path in sorted(package.rglob("*.py")):
        level = rank.get(path.relative_to(package).with_suffix("").parts[0], rank.get("", len(levels)))
        for module, line, _ in imports(path):
            parts = module.split(".")
            inside = parts[:2] == ["partool", name] and len(parts) > 2
            if inside and rank.get(parts[2], rank.get("", -1)) > level:
                found.append(f"{path.relative_to(package)}:{line} imports {module} from a higher part")
    return found


@pytest.mark.parametrize("name", sorted(INSIDE))
def test_parts_of_a_package_import_only_downwards(name: str) -> None:
    assert upward_inside(ROOT / "partool" / name, name, INSIDE[name]) == []


def test_the_checker_sees_an_upward_import_in_a_package(tmp_path: Path) -> None:
    (tmp_path / "time").mkdir()
    (tmp_path / "training").mkdir()
    (tmp_path / "time/layer.py").write_text("def f():\n    from partool.cost.training import step\n")
    (tmp_path / "training/step.py").write_text("from partool.cost.time import layer\n")
    bad = "time/layer.py:2 imports partool.cost.training"
    assert upward_inside(tmp_path, "cost", INSIDE["cost"]) == [
        f"{name} from a higher part" for name in (bad, f"{bad}.step")
    ]


def test_only_prices_of_training_read_its_settings() -> None:
    """All other prices take a ``Workload``, so that other jobs can use them; mypy then rejects fields of training."""
    prices = ROOT / "partool/cost"
    reading = {path for path in prices.rglob("*.py") if any(module == TRAINING for module, _, _ in imports(path))}
    assert {path.relative_to(prices).parts[0] for path in reading} == {"training"}


@pytest.mark.parametrize("name", sorted(RANK))
def test_partool_imports_only_downwards_and_never_the_runtime(name: str) -> None:
    assert violations(ROOT / "partool" / name, name) == []


def members(package: Path) -> set[str]:
    """Return the names of a package's modules and of its folders with modules."""
    files = {path.stem for path in package.glob("*.py")}
    return files | {path.relative_to(package).parts[0] for path in package.rglob("*/*.py")}


def test_every_package_and_module_of_partool_has_a_layer(tmp_path: Path) -> None:
    assert members(ROOT / "partool") == {*RANK, *AT_TOP}
    for name in ("new.py", "room/deep/module.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert members(tmp_path) == {"new", "room"}


def test_the_table_of_packages_names_them_all() -> None:
    text = (ROOT / "docs/design/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`partool\..*?) \|", text, re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`partool\.(\w+)`", row)) == sorted({*RANK, *DATA})


def test_prices_may_not_import_engines(tmp_path: Path) -> None:
    (tmp_path / "price.py").write_text("from partool.engines.read import read\n")
    assert violations(tmp_path, "cost", tmp_path) == [
        "price.py:1 imports partool.engines.read from a higher layer",
        "price.py:1 imports partool.engines.read.read from a higher layer",
    ]
    (tmp_path / "price.py").rename(tmp_path / "price.txt")  # what a file imports is read once
    (tmp_path / "rate.py").write_text("import partool.unknown\nfrom partool.process import python_command\n")
    assert violations(tmp_path, "cost", tmp_path) == ["rate.py:1 imports partool.unknown, which has no layer"]


def test_runtime_imports_only_pure_data_from_partool() -> None:
    found = []
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        for module, line, _ in imports(path):
            parts = module.split(".")
            if parts[0] == "partool" and len(parts) > 1 and parts[1] not in RUNTIME_MAY_IMPORT | {"__version__"}:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert found == []


UPWARD = {
    ("partool_runtime.fused.self_check", "partool_runtime.parallel.comm"): "ranks agree on the result of a check",
}
"""Imports that lead up in the order of packages, with what they are for. This list only shrinks."""


@pytest.mark.parametrize(
    ("package", "layers"), [("partool_runtime", RUNTIME_LAYERS), ("partool_kernels", KERNEL_LAYERS)]
)
def test_packages_of_runtime_and_kernels_import_downwards(package: str, layers: list[list[str]]) -> None:
    edges = graph(modules(ROOT), typing=False)
    assert [name for name in edges if name.split(".")[0] == package and level_of(name, layers) is None] == []
    assert upward(edges, package, layers) == [pair for pair in UPWARD if pair[0].split(".")[0] == package]


def test_the_order_sees_imports_that_lead_up_and_aside() -> None:
    layers = [["low", "room.types"], ["*.describe"], ["room", "beside"]]
    edges = {
        "p.low": {"p.room.types", "p.room.more", "q.room.more"},
        "p.room.more": {"p.low", "p.room.last", "p.other.describe", "p.beside"},
        "p.other.describe": {"p.room.types", "p.room"},
    }
    assert upward(edges, "p", layers) == [
        ("p.low", "p.room.more"), ("p.low", "p.room.types"), ("p.other.describe", "p.room"),
        ("p.room.more", "p.beside"),
    ]  # fmt: skip


def test_no_modules_import_each_other() -> None:
    """Checked over all imports, including those in functions and type-checking blocks."""
    assert cycles(graph(modules(ROOT))) == []
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_every_module_can_be_imported_first() -> None:
    """A package's ``__init__`` runs before its modules, so import cycles may go through it."""
    assert cycles(executed(modules(ROOT))) == []


def test_circles_through_packages_are_seen(tmp_path: Path) -> None:
    texts = {"__init__": "from partool.a import one", "a/__init__": "", "a/one": "import partool.b.two"}
    for name, text in (
        texts | {"b/__init__": "from partool.b.three import x", "b/three": "import partool.a.one"}
    ).items():
        file = tmp_path / "partool" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "partool/b/two.py").write_text("")
    found = modules(tmp_path)
    assert cycles(graph(found)) == []
    assert cycles(executed(found)) == [["partool.a.one", "partool.b", "partool.b.three"]]


def test_no_two_files_have_classes_of_one_name() -> None:
    assert shared_names(modules(ROOT)) == {}


def test_agents_report_a_bad_plan_without_torch() -> None:
    """An agent loads torch only where it starts ranks, with stop signals blocked."""
    code = "import sys, partool_runtime.agent.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_registry_of_kernels_imports_neither_torch_nor_triton() -> None:
    code = "import sys, partool_kernels.registry.look_up; print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_family_can_be_imported_first() -> None:
    names = [path.parent.name for path in (ROOT / "kernels/partool_kernels").glob("*/describe.py")]
    assert len(names) > 8
    # Each import runs in a fork, so that no module finds another's imports.
    code = "import importlib, os, sys\nfor name in sys.argv[1:]:\n    if os.fork() == 0:\n"
    code += "        importlib.import_module(f'partool_kernels.{name}.describe')\n        os._exit(0)\n"
    code += "    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, name\n"
    subprocess.run([sys.executable, "-c", code, *names], check=True, timeout=60)


def test_kernels_import_neither_partool_nor_the_runtime() -> None:
    modules = [m for path in (ROOT / "kernels").rglob("*.py") for m, _, _ in imports(path)]
    assert [m for m in modules if m.split(".")[0] in {"partool", "partool_runtime"}] == []


def raises_interrupts(path: Path) -> list[int]:
    """Return the lines of a file that raise KeyboardInterrupt, which belongs to the process that a user interrupts."""
    text = path.read_text(encoding="utf-8")
    if "KeyboardInterrupt" not in text:
        return []
    raised = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Raise) and node.exc is not None)
    return sorted(node.lineno for node in raised if "KeyboardInterrupt" in ast.unparse(node.exc or node))


def test_only_commands_raise_interrupts(tmp_path: Path) -> None:
    files = [path for package in ("partool", "runtime", "kernels") for path in sorted((ROOT / package).rglob("*.py"))]
    files = [path for path in files if path.parent != ROOT / "partool/cli"]
    assert [f"{path.relative_to(ROOT)}:{line}" for path in files for line in raises_interrupts(path)] == []
    (tmp_path / "bad.py").write_text("raise KeyboardInterrupt\nraise KeyboardInterrupt() from x\nraise Stopped\n")
    assert raises_interrupts(tmp_path / "bad.py") == [1, 2]


def calls(path: Path, names: set[str]) -> set[str]:
    """Return those of ``names`` that a file calls, as functions or as attributes."""
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in names):
        return set()
    called = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return names & {getattr(function, "id", getattr(function, "attr", "")) for function in called}


@pytest.mark.parametrize(
    ("names", "makers"),
    [
        (
            {"Thread", "ThreadPoolExecutor", "Timer"},
            {"threads.py", "agent/lifeline.py", "agent/meeting.py", "calibrate/storage.py"},
        ),
        ({"new_group", "split_group"}, {"groups.py", "checkpoint/_agreement.py"}),
    ],
)
def test_threads_and_groups_have_the_makers_that_the_page_names(names: set[str], makers: set[str]) -> None:
    """``agent/meeting.py`` and ``calibrate/storage.py`` run in processes that start ranks, not in ranks.

    The ``Timer`` of telemetry is another class.
    """
    runtime = ROOT / "runtime/partool_runtime"
    files = [path for path in sorted(runtime.rglob("*.py")) if path.parent.name != "telemetry"]
    assert {path.relative_to(runtime).as_posix() for path in files if calls(path, names)} == makers


ORDER = {
    "tensor": "apply_tensor", "experts": "apply_experts", "fp8": "use_fp8", "sequence": "apply_sequence",
    "fused kernels": "fuse", "attention kernels": "select_attention", "tiles": "_tile", "recompute": "recompute",
    "compile": "compile_blocks", "offload": "offload",
}  # fmt: skip
"""Functions that ``parallelize`` calls, by the word of the page."""


def test_the_page_has_the_order_in_which_a_layout_is_applied() -> None:
    page = (ROOT / "docs/design/architecture.md").read_text(encoding="utf-8")
    sentence = re.search(r"applies, in fixed order: (.*?);", page, re.DOTALL)
    assert sentence is not None
    words = [" ".join(word.split()) for word in sentence[1].split("→")]
    tree = ast.parse((ROOT / "runtime/partool_runtime/parallel/apply.py").read_text(encoding="utf-8"))
    (body,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "parallelize")
    lines = {
        node.func.id: node.lineno
        for node in ast.walk(body)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert words == list(ORDER)
    assert sorted(ORDER.values(), key=lines.__getitem__) == list(ORDER.values())


PRINTERS = {"partool/plan/terminal.py"}
AGENT = {f"runtime/partool_runtime/{name}.py" for name in ("agent/run", "agent/together", "agent/elastic", "export")}


PRINTING = re.compile(r"\b(print|Console|typer\.s?echo|sys\.std(out|err)\.write)\(")


def test_one_module_prints() -> None:
    """All terminal output passes ``partool.plan.terminal``, in partool and in the runtime's processes that print."""
    found = []
    for path in sorted([*(ROOT / "partool").rglob("*.py"), *(ROOT / name for name in AGENT)]):
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if not PRINTING.search(text):
            continue  # parsing all files takes seconds
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or name in PRINTERS:
                continue
            called = ast.unparse(node.func)
            if called in ("print", "Console", "typer.echo", "typer.secho", "sys.stdout.write", "sys.stderr.write"):
                found.append(f"{name}:{node.lineno} calls {called}")
    assert found == []


PRIVATE = re.compile(r"(?<![\w.])(?!self\._)\w+(\.\w+)*\._(?!_)|import .*\b_|^\s+(\w+, )*_\w+,?$", re.MULTILINE)
"""A private name of another object, or one that is imported, also on a line of its own."""


def private_torch_names(path: Path) -> list[str]:
    """Return the private names of torch that a file imports or reads as attributes of torch's modules, with lines."""
    text = path.read_text(encoding="utf-8")
    if "torch" not in text or not PRIVATE.search(text):
        return []  # parsing all files takes seconds
    tree = ast.parse(text)
    bound = {name: full for name, full in imported_names(tree).items() if full.split(".")[0] == "torch"}
    used = [(line, module) for module, line, _ in imports(path)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            used += [(node.lineno, f"{bound[head]}.{rest}")] if head in bound else []
    private = [(line, name) for line, name in used if re.match(r"torch\..*?(?<=\.)_(?!_)", name)]
    return [f"{line} {name}" for line, name in sorted(set(private))]


def test_private_torch_names_stay_in_one_package(tmp_path: Path) -> None:
    files = [path for package in ("partool", "runtime", "kernels") for path in sorted((ROOT / package).rglob("*.py"))]
    files = [path for path in files if path.parent.name != "torch_internals"]
    assert [f"{path.relative_to(ROOT)}:{name}" for path in files for name in private_torch_names(path)] == []
    bad = "import torch\nimport torch.distributed as dist\nfrom torch._ops import X\ntorch._foreach_mul_(a, b)\n"
    bad += "torch._C.f()\ndist.distributed_c10d._world\ntorch.__version__\nself._x\nother._y\n"
    (tmp_path / "bad.py").write_text(bad)
    assert private_torch_names(tmp_path / "bad.py") == [
        "3 torch._ops", "3 torch._ops.X", "4 torch._foreach_mul_", "5 torch._C", "5 torch._C.f",
        "6 torch.distributed.distributed_c10d._world",
    ]  # fmt: skip


def starts(path: Path) -> list[int]:
    """Return the lines of a file that may start a Python process: ``sys.executable``, ``-c`` and ``-m``."""
    text = path.read_text(encoding="utf-8")
    if not any(word in text for word in ("executable", '"-c"', '"-m"', "'-c'", "'-m'")):
        return []  # parsing all files takes seconds
    tree = ast.parse(text)
    found = [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "executable")
        or (isinstance(node, ast.ImportFrom) and "executable" in {alias.name for alias in node.names})
        or (isinstance(node, ast.Constant) and node.value in ("-c", "-m"))
    ]
    return sorted(set(found))


def test_one_module_starts_python() -> None:
    files = [path for package in ("partool", "runtime", "kernels") for path in sorted((ROOT / package).rglob("*.py"))]
    assert [f"{path.relative_to(ROOT)}:{line}" for path in files for line in starts(path)] == [
        f"partool/process.py:{line}" for line in starts(ROOT / "partool/process.py")
    ]
    assert "-P" in python_command("x")
    assert "-I" not in python_command("x")


def test_the_checker_sees_a_python_that_is_started(tmp_path: Path) -> None:
    for text in ("run([sys.executable, 'x.py'])", "from sys import executable", "run(['python', '-c', text])"):
        (tmp_path / "bad.py").write_text(f"import sys\n{text}\n")
        assert starts(tmp_path / "bad.py") == [2]


def compares_code_bases(path: Path) -> list[int]:
    """Return the lines of a file that compare a code base by name, where a fact of its record is to be read."""
    text = path.read_text(encoding="utf-8")
    if "stack.name" not in text:
        return []
    compared = (
        (node.lineno, [ast.unparse(side) for side in (node.left, *node.comparators)])
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare)
    )
    return sorted(line for line, sides in compared if any(side.endswith("stack.name") for side in sides))


def test_prices_and_searches_read_facts_of_code_bases_not_names(tmp_path: Path) -> None:
    """Tables of published runs name code bases, so ``partool.replay`` compares names."""
    files = [path for path in sorted((ROOT / "partool").rglob("*.py")) if path.parent.name != "replay"]
    assert [f"{path.relative_to(ROOT)}:{line}" for path in files for line in compares_code_bases(path)] == []
    (tmp_path / "bad.py").write_text("a = job.stack.name != 'partool'\nb = PARTOOL.name == stack.name\nc = x.name\n")
    assert compares_code_bases(tmp_path / "bad.py") == [1, 2]


_PICKLERS = ("pickle", "torch", "marshal", "shelve")
_PICKLING = re.compile(rf"\b({'|'.join(_PICKLERS)})\.(load|Unpickler|open)|_object")


def unpickles(path: Path) -> list[int]:
    """Return the lines of a file that read a pickle, from a file or from another rank."""
    found: list[int] = []
    text = path.read_text(encoding="utf-8")
    if not _PICKLING.search(text):
        return found
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Attribute):
            continue
        of = node.value.id if isinstance(node.value, ast.Name) else ""
        loads = of in _PICKLERS and node.attr in ("load", "loads", "Unpickler", "open")
        if loads or ("_object" in node.attr and node.attr.startswith(("all_gather", "broadcast", "gather", "scatter"))):
            found.append(node.lineno)
    return found


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    files = [path for package in ("partool", "runtime", "kernels") for path in sorted((ROOT / package).rglob("*.py"))]
    assert [f"{path.relative_to(ROOT)}:{line}" for path in files for line in unpickles(path)] == []
    (tmp_path / "bad.py").write_text("pickle.load(f)\ndist.all_gather_object(a, b)\ntorch.load(f)\njson.load(f)\n")
    assert unpickles(tmp_path / "bad.py") == [1, 2, 3]


def test_the_checker_sees_a_violation(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    import torch\nfrom partool.cli import main\n")
    assert {m for m, _, _ in imports(bad)} == {"torch", "partool.cli", "partool.cli.main"}
