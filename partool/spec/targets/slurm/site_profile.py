"""A site's profile: fields of ``launch.slurm`` in a file of their own, which all specs of a site can share."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from partool.diagnostics.record import Diagnostic, Span
from partool.spec import _yaml, loader
from partool.spec._source import Source, SpecPath
from partool.spec.targets.slurm.section import SlurmSpec

INPUT = "launch/slurm/profile"
"""Name of the profile's hash among the inputs of a plan."""
_SECTION = ("launch", "slurm")
_HELP = "the profile holds fields of launch.slurm, one a line: partition: gpu"


def from_folder(path: str, folder: Path) -> Path:
    """Return ``path`` as an absolute path: a relative path is relative to ``folder``, ``~/`` is the user's home."""
    # Path.expanduser raises if there is no home; os.path.expanduser leaves the path unchanged.
    return folder / (os.path.expanduser(path) if path.startswith("~/") else path)


@dataclass(frozen=True)
class Merged:
    """The section, merged with the profile that it names."""

    slurm: SlurmSpec
    findings: list[Diagnostic] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    """Name of the input → SHA-256 of the profile, for ``Plan.inputs``; empty without a profile."""
    spans: dict[SpecPath, Span] = field(default_factory=dict)
    """Path in the spec → span in the profile, for each value that came from the profile."""

    def placed(self, finding: Diagnostic) -> Diagnostic:
        """Return a finding about the merged section with its place in the profile, if the profile gave the value."""
        span = self.spans.get(finding.path)
        return finding if span is None or finding.span is not None else replace(finding, span=span)


def with_site_profile(slurm: SlurmSpec, base_dir: Path) -> Merged:
    """Merge the site profile that ``slurm`` names into ``slurm``.

    Fields of the section win over fields of the profile; entries of ``options`` are merged one by one. ``profile``
    becomes absolute. Findings about the profile carry their place in the profile.
    """
    if slurm.profile is None:
        return Merged(slurm)
    path = from_folder(slurm.profile, base_dir)
    source = Source(str(path))
    text = loader.read(path)
    if isinstance(text, Diagnostic):
        message = f"the site profile cannot be used: {text.message}"
        path_here = (*_SECTION, "profile")
        return Merged(slurm, [Diagnostic("PT529", message, path=path_here, help=text.help or _HELP)])
    source.text = text
    profile, findings = _read(source)
    if profile is None:
        return Merged(slurm, findings)
    given = {name: getattr(slurm, name) for name in slurm.model_fields_set}
    merged = {name: getattr(profile, name) for name in profile.model_fields_set} | given
    merged["options"] = {**profile.options, **slurm.options}
    merged["profile"] = str(path)
    if "setup" not in given and profile.setup is not None:
        merged["setup"] = str(from_folder(profile.setup, path.parent))
    theirs = {(*_SECTION, *within): span for within, span in source.keys.items() if not _given(slurm, within)}
    inputs = {INPUT: hashlib.sha256(text.encode()).hexdigest()}
    return Merged(SlurmSpec.model_construct(**merged), [], inputs, theirs)


def _given(slurm: SlurmSpec, within: SpecPath) -> bool:
    """Return True if the spec itself, not the profile, sets the key at the path ``within`` the section."""
    if within[0] == "options":
        return within[-1] in slurm.options
    return within[0] in slurm.model_fields_set


def _read(source: Source) -> tuple[SlurmSpec | None, list[Diagnostic]]:
    document, findings = _yaml.parse(source)
    source.note_secrets(document)
    if findings:
        return None, [replace(finding, message=f"in the site profile: {finding.message}") for finding in findings]
    if not isinstance(document, dict):
        message = "the site profile is no section with keys"
        return None, [Diagnostic("PT007", message, span=Span(source.file, 1, 1, 1, 2), help=_HELP)]
    if "profile" in document:
        message = "a site profile cannot name another one"
        span = source.span(("profile",), key=True)
        return None, [Diagnostic("PT529", message, span=span, help="put all fields into one file")]
    spec, wrong = loader.validate_section("launch", {"slurm": document})
    if spec is None:
        placed = [_placed(finding, source) for finding in wrong]
        return None, sorted(placed, key=lambda finding: finding.span.line if finding.span else 0)
    return spec.launch.slurm, []


def _placed(finding: Diagnostic, source: Source) -> Diagnostic:
    """Return a finding about ``launch.slurm`` with the position in the profile that it is about."""
    within = finding.path[len(_SECTION) :]
    return source.located(replace(finding, path=within, span=source.span(within, key=finding.code == "PT101")))
