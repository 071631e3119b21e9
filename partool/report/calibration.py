"""Print a calibration profile as text."""

from __future__ import annotations

from collections.abc import Iterator

from partool.catalog.profile_file import Figure, Profile, Scalar

_SCALES = {
    "flop/s": ("GFLOP/s", 1e9),
    "byte/s": ("GB/s", 1e9),
    "parameter/s": ("M parameters/s", 1e6),
    "s": ("µs", 1e-6),
    "s/element": ("ps/element", 1e-12),
}


def calibration_text(profile: Profile) -> str:
    """Return one line per figure with its value, its spread and its number of samples."""
    machine = profile.machine
    ranks = f"{machine.ranks} rank{'s' * (machine.ranks > 1)}"
    device = machine.device_name or machine.processor or machine.accelerator
    work = f"{device}, {ranks} at work, {machine.cores} cores, torch {machine.torch}"
    lines = [f"{machine.accelerator}: {work if machine.cores else 'runs on machines elsewhere'}"]
    rows = list(_rows(profile))
    width = max((len(name) for name, _ in rows), default=0)
    lines += [f"  {name:<{width}}  {text}" for name, text in rows]
    for scalars in profile.scalars:
        for name, scalar in (("step time", scalars.time), ("memory", scalars.memory)):
            if scalar is not None:
                lines.append(f"  {scalars.stack}: {scalar_text(name, scalar)}")
    if not profile.complete:
        lines.append("  not complete: it was interrupted")
    return "\n".join(lines)


def scalar_text(name: str, scalar: Scalar) -> str:
    """Return a scalar as one line."""
    runs = "run" if scalar.n == 1 else "runs"
    return f"{name} measured over predicted {scalar.value:.3f} ± {scalar.spread:.1%}, median of {scalar.n} {runs}"


def _rows(profile: Profile) -> Iterator[tuple[str, str]]:
    figures = profile.figures
    for name, by_precision in (
        ("matrix products", figures.achievable_flops),
        ("attention", figures.attention_flops),
    ):
        for precision, figure in by_precision.items():
            yield f"{name}, {precision}", _text(figure)
    for precision, by_length in figures.attention_by_length.items():
        for length, figure in by_length.items():
            yield f"attention of length {length}, {precision}", _text(figure)
    for precision, product in figures.products.items():
        yield f"matrix products without their elements, {precision}", _text(product.flops_per_s)
        yield f"element of a matrix product, {precision}", _text(product.element_s)
    single = (
        ("copies and element-wise", figures.stream_bytes_per_s),
        ("first writes to memory", figures.fresh_bytes_per_s),
        ("start of an operator", figures.operator_s),
        ("host link", figures.host_link_bytes_per_s),
        ("AdamW on the CPU", figures.adam_parameters_per_s),
        ("writes to the storage of runs", figures.storage_bytes_per_s),
    )
    for name, figure_or_none in single:
        if figure_or_none is not None:
            yield name, _text(figure_or_none)
    for name, line in figures.collectives.items():
        yield f"{name}, start", _text(line.latency_s)
        yield f"{name}, rate", _text(line.bytes_per_s)


def _text(figure: Figure) -> str:
    unit, scale = _SCALES[figure.unit]
    spread = figure.mad / figure.value if figure.value else 0.0
    return f"{figure.value / scale:10.4g} {unit:<14} ± {spread:5.1%}  ({figure.n} samples)"
