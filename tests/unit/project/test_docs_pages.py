"""The pages of docs: every link and anchor resolves, designs have one picture, results say when, how and where."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from partool.catalog.lookup import table
from partool.diagnostics.rules import RULES

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PARTS = ("guide", "design", "results")
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))}
PAGES["README.md"] = (ROOT / "README.md").read_text("utf-8")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SOURCES = r"(?<![./\w])(?:partool|runtime|kernels|tests)/[\w/]+(?:\.\w+)?"


def prose(text: str) -> str:
    """Return a page without its code blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-")
        number = next(n for n in range(1000) if (f"{anchor}-{n}" if n else anchor) not in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def of(part: str) -> list[str]:
    return [name for name in PAGES if name.startswith(f"docs/{part}/")]


def dead(name: str, text: str) -> list[str]:
    """Return the relative links of a page that lead to no file, or to no heading of it."""
    found = []
    for link in LINK.findall(prose(text)):
        path, _, anchor = link.partition("#")
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(file.read_text("utf-8"))):
            found.append(link)
    return found


def test_every_link_and_anchor_leads_somewhere() -> None:
    assert sum(len(LINK.findall(text)) for text in PAGES.values()) > 120
    assert {name: links for name, text in PAGES.items() if (links := dead(name, text))} == {}
    page = "[a](docs/README.md) [b](#more) [c](docs/none.md) [d](docs/README.md#none) `[e](f)`\n## More\n"
    assert dead("README.md", page) == ["docs/none.md", "docs/README.md#none"]


def test_every_page_is_in_the_index_under_its_part() -> None:
    index = PAGES["docs/README.md"]
    assert set(PAGES) == {"README.md", "docs/README.md", *(name for part in PARTS for name in of(part))}
    for part, section in zip(PARTS, re.split(r"^## ", index, flags=re.MULTILINE)[1:], strict=True):
        assert {f"docs/{link}" for link in LINK.findall(section)} == set(of(part))
    assert "(docs/README.md)" in PAGES["README.md"].rpartition("## More")[2]


@pytest.mark.parametrize("name", of("design"))
def test_a_design_page_has_one_picture_whose_modules_exist(name: str) -> None:
    pictures = [body for kind, body in FENCE.findall(PAGES[name]) if kind == "mermaid"]
    assert len(pictures) == 1
    nodes = re.findall(r'(\w+)\["([^"]+)"\]', pictures[0])
    assert len(nodes) == len(dict(nodes)), "each node is drawn once"
    edges = re.findall(r"^  (\w+)(?:\[[^\]]*\])? *(?:<?-[-.]+>?|---)(?:\|[^|]*\|)? *(\w+)", pictures[0], re.MULTILINE)
    assert {end for edge in edges for end in edge} == dict(nodes).keys(), "each node has an edge, and each edge nodes"
    paths = re.findall(SOURCES, pictures[0])
    assert len(paths) >= 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_sources_that_pages_name_exist() -> None:
    old = re.compile(r"^\|[^|]*", re.MULTILINE)  # the first column of moved.md has paths that are no more
    texts = PAGES | {"docs/design/moved.md": old.sub("", PAGES["docs/design/moved.md"])}
    for part in (*PARTS, "README.md"):
        names = of(part) or [f"docs/{part}"]
        paths = [(name, path) for name in names for path in re.findall(rf"`({SOURCES})`", texts[name])]
        assert [each for each in paths if not (ROOT / each[1]).exists()] == []


def test_pages_that_code_names_exist() -> None:
    tops = ("partool", "runtime", "kernels", "tests", "specs", "templates", "deploy")
    kinds = (".py", ".md", ".yaml", ".json", ".sbatch")
    files = [ROOT / "Makefile", *(path for top in tops for path in (ROOT / top).rglob("*") if path.suffix in kinds)]
    named = [
        (path.name, page)
        for path in files
        for page in re.findall(r"(?<![\w/-])docs/[\w/-]+\.md", path.read_text("utf-8"))
        if path != Path(__file__)
    ]
    assert len(named) > 15
    assert [each for each in named if not (ROOT / each[1]).is_file()] == []


@pytest.mark.parametrize("name", of("results"))
def test_results_state_date_command_and_machine(name: str) -> None:
    lines = re.findall(r"^\* (Date|Command|Machine): \S.*$", PAGES[name], re.MULTILINE)
    assert lines
    assert lines == ["Date", "Command", "Machine"] * (len(lines) // 3)
    assert len(lines) == 3 or len(lines) // 3 == PAGES[name].count("\n\n* Date: ")


def test_no_page_names_a_path_of_one_machine() -> None:
    assert [name for name, text in PAGES.items() if re.search(r"(?<!\w)/(?:work|tmp|root|home)/", text)] == []


def test_ranges_of_codes_are_those_of_the_rules() -> None:
    rows = re.findall(r"^\| PT(\d+) to PT(\d+) \|.*\| (\d+) \|$", PAGES["docs/guide/errors.md"], re.MULTILINE)
    codes = sorted(int(code[2:]) for code in RULES)
    ranges = [[code for code in codes if int(first) <= code <= int(last)] for first, last, _ in rows]
    assert [code for each in ranges for code in each] == codes
    assert [(each[0], each[-1], len(each)) for each in ranges] == [(int(a), int(b), int(n)) for a, b, n in rows]


def test_the_page_about_plans_has_the_rows_and_terms_of_a_plan() -> None:
    """Figures are compared by ``test_samples``."""

    def texts(name: str) -> str:
        return "".join(body for kind, body in FENCE.findall(PAGES[name]) if kind == "text")

    def rows(text: str) -> list[str]:
        return re.findall(r"^([A-Z][a-z]+)(?: {3,}|$)", text, re.MULTILINE)

    screen, page = texts("README.md"), texts("docs/guide/reading-a-plan.md")
    assert len(rows(screen)) > 10
    assert set(rows(screen)) - {"More"} <= {*rows(page), *re.findall(r"^Next$", page, re.MULTILINE)}
    for heading in ("Memory per rank, at the peak", "Time per step", "Next best", "What if"):
        assert re.search(rf"^{heading}", page, re.MULTILINE)
    for line in ("parameters", "gathered", "gradients", "optimizer", "activations", "loss", "total", "forward", "step"):
        assert re.search(rf"^{line} ", page, re.MULTILINE)
    assert PAGES["README.md"].count("\n") <= 160


def listed(names: Iterable[str]) -> str:
    """Return names as a sentence of code, in lines of at most 150 characters."""
    text = ", ".join(f"`{name}`" for name in sorted(names)) + "."
    return textwrap.fill(text, 150, break_long_words=False, break_on_hyphens=False)


def slices() -> str:
    """Return the table of slices as a page shows it."""
    rows = []
    for name, entry in table("accelerators").items():
        if "slices" in entry:
            units, gib, most = (entry["slices"][column] for column in ("units", "usable_gib", "most"))
            parts = [f"`{each}`: {units[each]}, {gib[each]} ({most[each]})" for each in units]
            rows.append(f"| `{name}` | {'; '.join(parts)} |")
    return "\n".join(["|---|---|", *rows])


CATALOG: dict[str, tuple[str, Callable[[], str]]] = {
    "accelerators": ("or `auto` (this machine):\n\n", lambda: listed(table("accelerators"))),
    "models": ("`model` takes one of these presets:\n\n", lambda: listed(table("models"))),
    "slices": ("| accelerator | profile: multiprocessors, GiB (slices per device) |\n", slices),
}


@pytest.mark.parametrize("name", CATALOG)
def test_the_catalog_is_listed(name: str) -> None:
    """``PARTOOL_GOLDEN=write pytest tests/unit/project/test_docs_pages.py`` writes the lists anew."""
    page, (words, made) = "docs/guide/hardware.md", CATALOG[name]
    before, after = (ROOT / page).read_text(encoding="utf-8").split(words)
    old, _, rest = after.partition("\n\n")
    if os.environ.get("PARTOOL_GOLDEN") == "write":
        (ROOT / page).write_text(f"{before}{words}{made()}\n\n{rest}", encoding="utf-8")
    else:
        assert old == made()
