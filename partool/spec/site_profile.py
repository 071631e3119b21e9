"""A site's profile: fields of ``launch.slurm`` in a file of their own, which all specs of a site can share."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from partool.diagnostics.record import Diagnostic, Span
from partool.spec import _yaml, loader
from partool.spec._source import Source
from partool.spec.launch import SlurmSpec

INPUT = "launch/slurm/profile"
"""Name of the profile's hash among the inputs of a plan."""
_SECTION = ("launch", "slurm")
_HELP = "the profile holds fields of launch.slurm, one a line: partition: gpu"


def with_site_profile(slurm: SlurmSpec, base_dir: Path) -> tuple[SlurmSpec, list[Diagnostic], dict[str, str]]:
    """Return the section with the fields of the profile that it names, the findings, and the file's hash.

    Fields that the section itself gives win; of ``options``, each one by itself. ``profile`` becomes absolute. Findings
    within the profile carry their place in it.
    """
    if slurm.profile is None:
        return slurm, [], {}
    path = base_dir / slurm.profile
    source = Source(str(path))
    text = loader.read(path)
    if isinstance(text, Diagnostic):
        message = f"the site profile cannot be used: {text.message}"
        return slurm, [Diagnostic("PT529", message, path=(*_SECTION, "profile"), help=text.help or _HELP)], {}
    source.text = text
    profile, found = _read(source)
    if profile is None:
        return slurm, found, {}
    given = {name: getattr(slurm, name) for name in slurm.model_fields_set}
    merged = {name: getattr(profile, name) for name in profile.model_fields_set} | given
    merged["options"] = {**profile.options, **slurm.options}
    merged["profile"] = str(path)
    if "setup" not in given and profile.setup is not None and not profile.setup.startswith("~"):
        merged["setup"] = str(path.parent / profile.setup)
    return SlurmSpec.model_construct(**merged), found, {INPUT: hashlib.sha256(text.encode()).hexdigest()}


def _read(source: Source) -> tuple[SlurmSpec | None, list[Diagnostic]]:
    document, found = _yaml.parse(source)
    if found:
        return None, [replace(finding, message=f"in the site profile: {finding.message}") for finding in found]
    if not isinstance(document, dict):
        message = "the site profile is no section with keys"
        return None, [Diagnostic("PT007", message, span=Span(source.file, 1, 1, 1, 2), help=_HELP)]
    if "profile" in document:
        message = "a site profile cannot name another one"
        span = source.span(("profile",), key=True)
        return None, [Diagnostic("PT529", message, span=span, help="put all fields into one file")]
    spec, wrong = loader.validate_section("launch", {"slurm": document})
    if spec is None:
        return None, [_placed(finding, source) for finding in wrong]
    return spec.launch.slurm, []


def _placed(finding: Diagnostic, source: Source) -> Diagnostic:
    """Return a finding about ``launch.slurm`` with its place in the profile."""
    within = finding.path[len(_SECTION) :]
    return replace(finding, path=within, span=source.span(within, key=finding.code == "PT101"))
