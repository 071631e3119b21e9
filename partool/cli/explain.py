"""``partool explain``."""

from __future__ import annotations

import textwrap
from difflib import get_close_matches
from typing import Annotated

import typer

from partool.diagnostics.rules import RULES, Rule, nearest
from partool.plan.terminal import say
from partool.plan.terms import glossary, term_names


def command(
    code: Annotated[
        str | None, typer.Argument(help="A rule (PT203) or a term (gathered); without it, all are listed.")
    ] = None,
) -> None:
    """Explain a rule, with an example that breaks it and one that does not, or a term of plans and reports."""
    if code is None:
        for rule in RULES.values():
            say(f"{rule.code}  {rule.title}")
        say(f"terms  {', '.join(term_names())}")
        return
    if meanings := glossary(code):
        say("\n".join(f"{code} ({where}): {meaning}" for where, meaning in meanings))
        return
    wanted = code.strip().upper()
    topic = RULES.get(wanted) or RULES.get(f"PT{wanted}")
    if topic is None:
        near = nearest(code) or get_close_matches(code.lower(), term_names(), n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else "partool explain lists them all"
        say(f"error: there is no rule and no term {code!r}\n  help: {hint}", err=True)
        raise typer.Exit(2)
    say(_page(topic))


def _page(rule: Rule) -> str:
    bad, good = (textwrap.indent(text.rstrip(), "    ") for text in (rule.bad, rule.good))
    return f"""{rule.code}: {rule.title}

{textwrap.fill(rule.reason, 88)}

This breaks it:

{bad}

This does not:

{good}"""
