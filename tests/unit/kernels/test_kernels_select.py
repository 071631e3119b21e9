"""The selector takes the fastest correct candidate, stores it, and reports why others were excluded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from partool_kernels.fp8.formats import Quantised
from partool_kernels.fp8.op import quantise
from partool_kernels.select import Candidate, NothingWorksError, Question, Selector, Store, products
from partool_kernels.select.attention import HeadSizes, attention, plain, problem
from partool_kernels.select.products import grouped, matmul, scaled
from partool_kernels.timing import HostTimer, Run, largest_cache_bytes


class Clock:
    """Timer that calls every candidate once and reports the next of the given times, in order."""

    def __init__(self, *times: float) -> None:
        self.times, self.measured = list(times), 0

    def medians_s(self, runs: Sequence[Run], repeats: int) -> list[float]:
        assert repeats >= 20
        self.measured += 1
        for run in runs:
            run()
        found, self.times = self.times[: len(runs)], self.times[len(runs) :]
        return found


def _result(value: float) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.tensor([1.0, value]),)


def _raises() -> Sequence[torch.Tensor]:
    raise RuntimeError("no kernel image\nfor this device")


def _problem(*candidates: Candidate, key: int = 1) -> Question:
    names = tuple(one.name for one in candidates)
    return Question("test", (("n", key),), names, lambda: candidates)


AB = (("a", 1.0), ("b", -3.0))
A, B, C = (Candidate(name, _result(2.0)) for name in "abc")


def test_the_fastest_is_taken_and_measured_once() -> None:
    clock = Clock(3.0, 2.0, 1.0)
    selector = Selector(clock)
    answer = selector.choose(_problem(A, B, C))
    assert (answer.name, answer.source, answer.seconds) == ("c", "measured", {"a": 3.0, "b": 2.0, "c": 1.0})
    assert selector.choose(_problem(A, B, C)) is answer
    assert clock.measured == 1


def test_within_three_percent_the_one_before_stays() -> None:
    assert Selector(Clock(1.0, 0.975, 0.98)).choose(_problem(A, B, C)).name == "a"
    assert Selector(Clock(1.0, 0.96, 0.95)).choose(_problem(A, B, C)).name == "b"


def test_what_raises_or_is_wrong_is_left_out_with_its_reason() -> None:
    broken, wrong = Candidate("broken", _raises), Candidate("wrong", _result(2.2))
    spoilt, longer = Candidate("spoilt", _result(torch.nan)), Candidate("longer", lambda: (torch.ones(3),))
    answer = Selector(Clock(2.0, 1.0)).choose(_problem(broken, A, wrong, spoilt, longer, B))
    assert answer.name == "b"
    assert answer.excluded == {
        "broken": "RuntimeError: no kernel image",
        "wrong": "differs by 0.1 of the largest element",
        "spoilt": "differs by nan of the largest element",
        "longer": "results [[3]] are not [[2]]",
    }
    with pytest.raises(NothingWorksError, match="broken: RuntimeError: no kernel image"):
        Selector(Clock()).choose(_problem(broken))


def test_one_that_works_needs_no_timing() -> None:
    clock = Clock()
    assert Selector(clock).choose(_problem(Candidate("broken", _raises), A)).name == "a"
    assert clock.measured == 0


def test_what_holds_for_the_whole_process_is_switched_on_only_for_its_own_calls() -> None:
    on: list[bool] = [False]

    @contextmanager
    def switched() -> Iterator[None]:
        on[0] = True
        yield
        on[0] = False

    def run(wanted: bool) -> tuple[torch.Tensor, ...]:
        assert on[0] is wanted
        return (torch.ones(1),)

    pair = (Candidate("one", lambda: run(False)), Candidate("other", lambda: run(True), switched))
    clock = Clock(2.0, 1.0)
    assert Selector(clock).choose(_problem(*pair)).name == "other"
    assert clock.measured == 2
    assert on == [False]


def test_nothing_is_measured_where_bits_have_to_repeat_or_while_a_compiler_traces() -> None:
    clock = Clock()
    assert Selector(clock, measure=False).choose(_problem(A, B)).source == "default"
    selector, names = Selector(clock), []

    @torch.compile(backend="eager")
    def traced(x: torch.Tensor) -> torch.Tensor:
        names.append(selector.choose(_problem(A, B)).name)
        return x + 1

    traced(torch.ones(1))
    assert names == ["a"]
    assert clock.measured == 0


def test_answers_are_kept_for_later_processes(tmp_path: Path) -> None:
    versions = {"torch": "2.13"}
    first = Selector(Clock(2.0, 1.0, 1.0, 2.0), Store("NVIDIA H200", versions, tmp_path))
    assert first.choose(_problem(A, B)).name == "b"
    assert first.choose(_problem(A, B, key=2)).name == "a"
    path = tmp_path / "nvidia-h200.json"
    assert sorted(json.loads(path.read_text())["answers"]) == ["test n=1", "test n=2"]
    clock = Clock(1.0, 2.0, 3.0)
    later = Selector(clock, Store("NVIDIA H200", versions, tmp_path))
    kept = later.choose(_problem(A, B))
    assert (kept.name, kept.source, kept.seconds) == ("b", "kept", {"a": 2.0, "b": 1.0})
    assert clock.measured == 0
    assert later.choose(_problem(A, B, C, key=2)).source == "measured"  # another set of candidates
    assert list(tmp_path.iterdir()) == [path]  # writing leaves no temporary file
    other = Selector(Clock(1.0, 2.0), Store("NVIDIA H200", {"torch": "2.14"}, tmp_path))
    assert other.choose(_problem(A, B)).name == "a"


@pytest.mark.parametrize("text", ["{", '{"format": 1}', "[]", '{"format":1,"device":"d","versions":{},"answers":[1]}'])
def test_a_spoilt_file_is_ignored_with_a_warning_and_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=r"d\.json (cannot be read|is not what partool wrote)"):
        assert Selector(Clock(2.0, 1.0), Store("d", {}, tmp_path)).choose(_problem(A, B)).name == "b"
    assert Store("d", {}, tmp_path).read()["test n=1"]["name"] == "b"


def test_a_folder_that_cannot_be_written_is_only_warned_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be"):
        assert Selector(Clock(2.0, 1.0), Store("d", {}, tmp_path / "file" / "x")).choose(_problem(A, B)).name == "b"


def test_attention_on_this_processor_is_measured_and_right() -> None:
    torch.manual_seed(0)
    heads = HeadSizes(1, 4, 2, 65, 8)
    run, answer = attention(Selector(HostTimer()), heads, torch.float32, torch.device("cpu"))
    assert set(answer.seconds) == {"flash", "math"}
    q, k, v = torch.randn(1, 4, 65, 8), torch.randn(1, 2, 65, 8), torch.randn(1, 2, 65, 8)
    assert torch.allclose(run(q, k, v), plain(q, k, v), atol=1e-5)
    default, answer = attention(Selector(HostTimer(), measure=False), heads, torch.float32, torch.device("cpu"))
    assert default is plain


def test_every_kernel_of_attention_is_asked_with_its_own_backend() -> None:
    heads, torch_here = HeadSizes(1, 2, 2, 16, 8), torch.device("cpu")
    run, answer = attention(Selector(Clock(2.0, 1.0)), heads, torch.float32, torch_here)
    assert answer.name == "math"
    q = torch.randn(1, 2, 16, 8)
    with torch.profiler.profile() as profile:
        run(q, q, q)
    names = {event.name for event in profile.events()}
    assert "aten::_scaled_dot_product_attention_math" in names
    # Kernels of other devices raise here, and are reported as excluded.
    _, answer = attention(Selector(Clock(1.0, 1.0, 1.0)), heads, torch.float32, torch_here, also=("cudnn", "flash3"))
    assert set(answer.excluded) == {"cudnn", "flash3"}


def test_products_are_chosen_among_what_there_is() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 8), torch.randn(3, 8)
    assert torch.equal(matmul(Selector(Clock()), a, b.T), a @ b.T)
    rows, weights, ends = torch.randn(6, 8).bfloat16(), torch.randn(2, 8, 16).bfloat16(), torch.tensor([2, 5])
    for times in ((1.0, 2.0), (2.0, 1.0)):
        out = grouped(Selector(Clock(*times)), rows, weights, ends)
        assert torch.allclose(out[:2].float(), (rows[:2] @ weights[0]).float(), rtol=0.02, atol=0.02)
        assert torch.allclose(out[2:5].float(), (rows[2:5] @ weights[1]).float(), rtol=0.02, atol=0.02)


def test_products_in_eight_bits_fall_back_on_the_kernel_of_our_own() -> None:
    torch.manual_seed(0)
    a, b = (quantise(torch.randn(128, 256), what, torch.float8_e4m3fn)[0] for what in ("plain", "plain square"))
    clock = Clock(1.0, 2.0)
    out = scaled(Selector(clock), a, b, torch.float32)
    assert torch.allclose(out, a.wide() @ b.wide().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_results_that_tell_nothing_decide_nothing(tmp_path: Path, value: float) -> None:
    truth, wrong = (Candidate(name, lambda times=times: (torch.full((3,), value) * times,)) for name, times in AB)
    store = Store("d", {}, tmp_path)
    with pytest.warns(RuntimeWarning, match="test n=1 is not measured: RuntimeError: results of a are zero, or not"):
        answer = Selector(Clock(2.0, 1.0), store).choose(_problem(truth, wrong))
    assert (answer.name, answer.source) == ("a", "default")
    assert store.read() == {}


def test_a_large_row_does_not_hide_mistakes_in_others() -> None:
    rows = torch.tensor([[1000.0, 1.0], [1.0, 2.0]])
    pair = Candidate("a", lambda: (rows,)), Candidate("b", lambda: (rows * torch.tensor([[1.0], [2.0]]),))
    by_row = Question("test", (), ("a", "b"), lambda: pair, by_row=True)
    assert Selector(Clock()).choose(by_row).excluded == {"b": "differs by 1 of the largest element"}


def test_without_memory_to_measure_training_goes_on(tmp_path: Path) -> None:
    class Full(Clock):
        def medians_s(self, runs: Sequence[Run], repeats: int) -> list[float]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def full() -> Sequence[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    store, selector = Store("d", {}, tmp_path), Selector(Full(), Store("d", {}, tmp_path))
    with pytest.warns(RuntimeWarning, match="OutOfMemoryError: CUDA out of memory") as seen:
        assert [selector.choose(_problem(A, B)).name for _ in range(2)] == ["a", "a"]
    assert len(seen) == 1
    with pytest.warns(RuntimeWarning, match="out of memory"):
        assert Selector(Clock(1.0), store).choose(_problem(A, Candidate("b", full), C)).source == "default"
    assert store.read() == {}


def test_an_implementation_whose_package_has_gone_is_not_taken(tmp_path: Path) -> None:
    heads, here = HeadSizes(1, 2, 2, 16, 8), torch.device("cpu")
    asked = problem(heads, torch.float32, here, ("flash", "math", "flash3"))
    store = Store("d", {}, tmp_path)
    store.put(asked.text, {"names": list(asked.names), "name": "flash3"})
    _, answer = attention(Selector(Clock(2.0, 1.0), store), heads, torch.float32, here, also=("flash3",))
    assert (answer.name, answer.source) == ("math", "measured")
    assert "flash_attn_interface" in answer.excluded["flash3"]


@pytest.mark.parametrize("square", ["plain", "plain square"])
def test_wrong_scales_are_found_whatever_is_multiplied(monkeypatch: pytest.MonkeyPatch, square: str) -> None:
    """Also where the inputs are zeros, such as the gradients of a batch without labels."""
    right = products._SCALED["triton"]

    def turned(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
        return right(a, Quantised(b.q, b.scale.flip(0)), dtype)

    def same(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
        return right(a, b, dtype)

    a, b = (quantise(torch.zeros(256, 256), what, torch.float8_e4m3fn)[0] for what in ("plain", square))
    for run, name in ((turned, "triton"), (same, "torch")):
        monkeypatch.setitem(products._SCALED, "torch", run)
        selector = Selector(Clock(2.0, 1.0))
        scaled(selector, a, b, torch.bfloat16)
        (answer,) = selector._answers.values()
        assert (answer.name, "torch" in answer.excluded) == (name, run is turned)


def test_measuring_leaves_the_random_numbers_of_training_as_they_are() -> None:
    before = torch.get_rng_state()
    matmul(Selector(Clock(1.0)), torch.ones(3, 8), torch.ones(8, 3))
    grouped(Selector(Clock(1.0, 2.0)), torch.ones(6, 8), torch.ones(2, 8, 16), torch.tensor([2, 5]))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("hip", "second_mib", "mib"), [(None, 50, 50), ("7.2", 4, 256), (None, 4, 4)])
def test_rocm_does_not_report_the_largest_cache(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, second_mib: int, mib: int
) -> None:
    """A buffer that is sized by the second cache would leave the inputs in the Infinity Cache."""
    monkeypatch.setattr(torch.version, "hip", hip)
    properties = SimpleNamespace(L2_cache_size=second_mib * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert largest_cache_bytes(torch.device("cuda")) == mib * 2**20
