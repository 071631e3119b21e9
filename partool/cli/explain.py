"""``partool explain``."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from partool.diagnostics.rules import RULES, Rule, nearest
from partool.plan.terminal import say


def command(
    code: Annotated[str | None, typer.Argument(help="Such as PT203; without it, all rules are listed.")] = None,
) -> None:
    """Explain a rule, with an example that breaks it and one that does not."""
    if code is None:
        for rule in RULES.values():
            say(f"{rule.code}  {rule.title}")
        return
    wanted = code.strip().upper()
    found = RULES.get(wanted) or RULES.get(f"PT{wanted}")
    if found is None:
        near = nearest(code)
        hint = f"did you mean {' or '.join(near)}?" if near else "partool explain lists them all"
        say(f"error: there is no rule {code!r}\n  help: {hint}", err=True)
        raise typer.Exit(2)
    say(_page(found))


def _page(rule: Rule) -> str:
    bad, good = (textwrap.indent(text.rstrip(), "    ") for text in (rule.bad, rule.good))
    return f"""{rule.code}: {rule.title}

{textwrap.fill(rule.reason, 88)}

This breaks it:

{bad}

This does not:

{good}"""
