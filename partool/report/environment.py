"""Tables of a plan's environment variables and of the fields that a site profile set, with each value's origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.plan.types import Plan
from partool.spec.launch import Secret
from partool.spec.targets.slurm.section import SlurmSpec

_OWN = "partool: "
"""Prefix of the origin of variables that partool sets in every plan."""


def environment_rows(plan: Plan) -> list[dict[str, str]]:
    """Return a row (name, value, origin) per variable; a secret has a reference in place of its value."""
    rows = [variable.model_dump() for variable in plan.environment]
    rows += [
        {"name": name, "value": _reference(secret), "origin": "launch.secrets"}
        for name, secret in plan.launch.secrets.items()
    ]
    return sorted(rows, key=lambda row: row["name"])


def _reference(secret: Secret) -> str:
    if secret.file is not None:
        return f"(secret: the file {secret.file})"
    return f"(secret: the key {secret.key} of the Kubernetes Secret {secret.secret})"


def site_rows(plan: Plan) -> list[dict[str, object]]:
    """Return a row (name, value, origin) for each field of ``launch.slurm`` that the site profile set."""
    slurm, default = plan.launch.slurm, SlurmSpec()
    if slurm.profile is None:
        return []
    written = plan.spec.get("launch", {}).get("slurm", {})
    origin = f"site profile {slurm.profile}"
    rows: list[dict[str, object]] = []
    for name in SlurmSpec.model_fields:
        value = getattr(slurm, name)
        if name == "options":
            options = written.get("options", {})
            rows += [
                {"name": f"launch.slurm.options.{key}", "value": text, "origin": origin}
                for key, text in slurm.options.items()
                if key not in options
            ]
        elif name != "profile" and name not in written and value != getattr(default, name):
            rows.append({"name": f"launch.slurm.{name}", "value": value, "origin": origin})
    return rows


def as_data(plan: Plan) -> dict[str, Sequence[Mapping[str, object]]]:
    """Return the tables of variables and of site-profile fields as data."""
    return {"environment": environment_rows(plan), "site_profile": site_rows(plan)}


def render_environment(plan: Plan, console: Console) -> None:
    """Print the variables of every rank, and the fields that came from a site profile."""
    rows = environment_rows(plan)
    _table("Environment of every rank", rows, "nothing is set", console)
    reasons = [(row["name"], *row["origin"].partition(": ")[::2]) for row in rows if ": " in row["origin"]]
    if reasons:
        console.print()
        console.print(Text("Why", "bold"))
        for name, origin, why in reasons:
            source = origin.partition(" (")[2].rstrip(")")
            # An address that wraps cannot be followed.
            console.print(Text(f"{name}: {why}" + (f"; {source}" if source else "")), soft_wrap=True)
    if decided := site_rows(plan):
        console.print()
        _table("From the site profile", decided, "", console)


def summary(plan: Plan) -> str:
    """Return one line on the variables, grouped by origin; empty if partool set all variables."""
    groups: dict[str, list[str]] = {}
    for row in environment_rows(plan):
        if not row["origin"].startswith(_OWN):
            groups.setdefault(row["origin"].partition(" (")[0], []).append(row["name"])
    return "; ".join(f"{', '.join(names)} ({origin})" for origin, names in groups.items())


def _table(title: str, rows: Sequence[Mapping[str, object]], nothing: str, console: Console) -> None:
    console.print(Text(title, "bold"))
    if not rows:
        console.print(nothing)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("name", overflow="fold")
    table.add_column("value", overflow="fold")
    table.add_column("origin", overflow="fold")
    for row in rows:
        table.add_row(Text(_shown(row["name"])), Text(_shown(row["value"])), Text(_short(str(row["origin"]))))
    console.print(table)


def _short(origin: str) -> str:
    return origin if origin.startswith("site profile") else origin.partition(": ")[0].partition(" (")[0]


def _shown(value: object) -> str:
    # Values are the user's: control characters would move the cursor or colour the terminal.
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in str(value))
