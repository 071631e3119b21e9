"""Configurations of aiter and vLLM: looked up as those tools do, and translated for partool's kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partool_kernels.registry import Config, Request, look_up
from partool_kernels.registry.aiter import AiterConfigs, AiterProduct, carried, split
from partool_kernels.registry.aiter_csv import AiterTimes, padded
from partool_kernels.registry.look_up import Registry
from partool_kernels.registry.tables import TableError
from partool_kernels.registry.vllm import Name, VllmConfigs, parse_name

EIGHT, SIXTEEN = "GEMM-A8W8_BLOCKSCALE", "GEMM-A16W16"
NAMES = (
    "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", "waves_per_eu",
    "matrix_instr_nonkdim", "cache_modifier", "NUM_KSPLIT",
)  # fmt: skip
ASKED = Request(
    "gemm_a8w8", "gfx950", ("float8_e4m3fn", "bfloat16"), (("n", 2112), ("k", 7168)), 64, (), "AMD Instinct MI355X", 256
)


def values(*numbers: Any) -> dict[str, Any]:
    return dict(zip(NAMES, numbers, strict=True))


def block(rows: int, parts: int = 1) -> dict[str, Any]:
    """Return a configuration that is identified by its rows per block."""
    return values(rows, 32, 128, 1, 4, 2, 4, 16, None, parts)


def put(root: Path, name: str, body: dict[str, Any]) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body))
    return path


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """Return a folder like aiter's: one family in the old layout, one in the new, and files that are ignored."""
    root = tmp_path / "configs"
    old, new = f"gemm/gfx950-{EIGHT}", "gfx950/triton/gemm/gemm_afp4wfp4"
    put(root, f"{old}.json", {"M_LEQ_64": block(1), "any": block(2)})
    # The entry for 2112 x 7168 up to 64 rows is copied from aiter.
    whole = {"M_LEQ_64": values(32, 32, 128, 1, 1, 2, 4, 16, None, 7), "M_LEQ_128": block(4)}
    whole |= {"M_GEQ_4096": block(8), "M_GEQ_8192": block(9)}
    put(root, f"{old}-N=2112-K=7168.json", whole | {"any": block(16)})
    put(root, f"{old}-B=16-N=2112-K=7168.json", {"any": block(32)})
    put(root, f"gemm/gfx942-{SIXTEEN}-N=64-K=64.json", {"any": block(64)})  # has no default file
    put(root, f"{new}/DEFAULT.json", {"any": block(128)})
    put(root, f"{new}/GEMM-AFP4WFP4-N=7168-K=2048.json", {"M_LEQ_8": values(4, 64, 512, 8, 4, 3, 1, 16, ".cg", 1)})
    put(root, "gemm/gfx950-GEMM-AFP4WFP4-N=7168-K=2048.json", {"any": block(256)})  # left behind by the move
    put(root, "gemm/gfx950-GEMM-AFP4WFP4.json", {"any": block(256)})
    put(root, "gfx950/triton/gemm/gemm_afp4wfp4_preshuffled/DEFAULT.json", {"M_LEQ_31": block(3), "any": block(5)})
    put(root, "gfx950/gluon/gemm/gemm_a16w16/DEFAULT.json", {"M_LEQ_31": block(3), "any": block(7)})
    return root


@pytest.mark.parametrize(
    ("gemm", "file", "key", "tuned", "rows"),
    [
        (AiterProduct(EIGHT, 64, 2112, 7168), f"gfx950-{EIGHT}-N=2112-K=7168.json", "M_LEQ_64", True, 32),
        (AiterProduct(EIGHT, 1, 2112, 7168), f"gfx950-{EIGHT}-N=2112-K=7168.json", "M_LEQ_64", True, 32),
        (AiterProduct(EIGHT, 65, 2112, 7168), f"gfx950-{EIGHT}-N=2112-K=7168.json", "M_LEQ_128", True, 4),
        (AiterProduct(EIGHT, 129, 2112, 7168), f"gfx950-{EIGHT}-N=2112-K=7168.json", "any", False, 16),
        (AiterProduct(EIGHT, 4095, 2112, 7168), f"gfx950-{EIGHT}-N=2112-K=7168.json", "any", False, 16),
        (AiterProduct(EIGHT, 10**6, 2112, 7168), f"gfx950-{EIGHT}-N=2112-K=7168.json", "M_GEQ_8192", True, 9),
        (AiterProduct(EIGHT, 4096, 2112, 7168), f"gfx950-{EIGHT}-N=2112-K=7168.json", "M_GEQ_4096", True, 8),
        (AiterProduct(EIGHT, 64, 2112, 7168, 16), f"gfx950-{EIGHT}-B=16-N=2112-K=7168.json", "any", False, 32),
        (AiterProduct(EIGHT, 64, 2112, 7168, 8), f"gfx950-{EIGHT}-N=2112-K=7168.json", "M_LEQ_64", True, 32),
        (AiterProduct(EIGHT, 64, 2113, 7168), f"gfx950-{EIGHT}.json", "M_LEQ_64", False, 1),
        (AiterProduct("GEMM-AFP4WFP4", 8, 7168, 2048), "GEMM-AFP4WFP4-N=7168-K=2048.json", "M_LEQ_8", True, 4),
        (AiterProduct("GEMM-AFP4WFP4", 8, 64, 64), "DEFAULT.json", "any", False, 128),
        (AiterProduct("GEMM-AFP4WFP4_PRESHUFFLED", 31, 64, 64), "DEFAULT.json", "M_LEQ_31", False, 3),
        (AiterProduct("GEMM-AFP4WFP4_PRESHUFFLED", 32, 64, 64), "DEFAULT.json", "any", False, 5),
        (AiterProduct(SIXTEEN, 31, 64, 64), "DEFAULT.json", "any", False, 7),  # bound 31 is ignored here
    ],
)
def test_aiter_is_looked_up_as_it_does_itself(
    configs: Path, gemm: AiterProduct, file: str, key: str, tuned: bool, rows: int
) -> None:
    found = AiterConfigs(configs).look_up("gfx950", gemm)
    assert found is not None
    assert (found.file.name, found.key, found.tuned, found.config["BLOCK_SIZE_M"]) == (file, key, tuned, rows)


def test_what_aiter_does_not_find(configs: Path) -> None:
    tables = AiterConfigs(configs)
    assert tables.look_up("gfx942", AiterProduct(SIXTEEN, 1, 64, 64)) is None  # no default file, so nothing is found
    assert tables.look_up("gfx950", AiterProduct("GEMM-AFP4WFP4", 9, 7168, 2048)) is None  # no bound matches
    assert tables.look_up("gfx950", AiterProduct(SIXTEEN, 1, 64, 64), backend="triton") is None
    assert tables.look_up("gfx950", AiterProduct(SIXTEEN, 1, 64, 64), backend="gluon") is not None


@given(st.integers(1, 1 << 14), st.integers(1, 1 << 14))
def test_rows_of_aiter_are_cut_at_its_bounds_only(m: int, other: int) -> None:
    from partool_kernels.registry.aiter import BOUNDS, _entry

    body = {f"M_LEQ_{bound}": block(bound) for bound in BOUNDS if bound % 3} | {"any": block(1)}
    keys = [_entry(body, AiterProduct(EIGHT, rows, 1, 1)) for rows in (m, other)]
    below = [sum(bound < rows for bound in BOUNDS) for rows in (m, other)]
    assert below[0] != below[1] or keys[0] == keys[1]


@pytest.mark.parametrize(
    ("given", "k", "expected"),
    [
        ((128, 7), 7168, (128, 7, 1024)),
        ((128, 14), 7168, (128, 14, 512)),
        ((512, 14), 1024, (512, 1, 1024)),  # 14, 7, 3 and 1 parts: 342 is below a block, 1024 is not
        ((128, 3), 1000, (128, 3, 384)),
        ((512, 1), 100, (64, 1, 128)),
        ((512, 1), 5, (16, 1, 16)),
    ],
)
def test_split_sums_are_corrected(given: tuple[int, int], k: int, expected: tuple[int, int, int]) -> None:
    fixed = split({"BLOCK_SIZE_K": given[0], "NUM_KSPLIT": given[1]}, k)
    assert (fixed["BLOCK_SIZE_K"], fixed["NUM_KSPLIT"], fixed["SPLITK_BLOCK_SIZE"]) == expected
    assert split(fixed, k) == fixed
    parts, part, size = (int(fixed[name] or 0) for name in ("NUM_KSPLIT", "SPLITK_BLOCK_SIZE", "BLOCK_SIZE_K"))
    assert parts * part >= k
    assert part % size == 0


def test_aiter_covers_and_lends_its_parameters(configs: Path) -> None:
    registry = Registry([configs])
    covered = registry.coverage(ASKED)
    assert (covered.implementation, covered.source, covered.distance) == ("aiter", "exact", 0.0)
    own = registry.get(ASKED)
    assert (own.implementation, own.source) == ("triton", "modelled")
    assert own.config == Config(
        (("BLOCK_M", 32), ("BLOCK_N", 32), ("GROUP_M", 1), ("SPLIT", 7)), 1, 2, waves_per_eu=4, matrix_instr_nonkdim=16
    )
    others = registry.coverage(replace(ASKED, rows=200))
    assert (others.implementation, others.source) == ("aiter", "rows")
    # Default files are not tuned entries; aiter has neither weight gradients nor other architectures.
    for changes in ({"shape": (("n", 64), ("k", 256))}, {"flags": ("rows",)}, {"architecture": "sm_90"}):
        request = replace(ASKED, **changes)
        assert registry.coverage(request).implementation == "triton"
    # Triton's products do not take blocks of four rows.
    assert registry.get(replace(ASKED, rows=100)).source == "heuristic"


def test_a_checkout_is_searched_for_its_folders(configs: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "aiter" / "ops" / "triton").mkdir(parents=True)
    configs.rename(checkout / "aiter" / "ops" / "triton" / "configs")
    times = checkout / "aiter" / "configs"
    times.mkdir()
    (times / "a8w8_blockscale_tuned_gemm.csv").write_text(CSV_OLD)
    (times / "a8w8_bpreshuffle_tuned_gemm.csv").write_text("weights in another order are another computation")
    registry = Registry([checkout])
    assert registry.coverage(ASKED).implementation == "aiter"
    mi300 = replace(ASKED, architecture="gfx942", units=304, rows=16, shape=(("n", 1536), ("k", 7168)))
    assert registry.coverage(mi300).implementation == "aiter (ck)"


CSV_OLD = (
    "cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
    "304,16,1536,7168,8,0,19.3027,a8w8_1,18.25,578.88,0.0\n"
    "304,16,1536,7168,9,0,12.5,a8w8_2,18.25,578.88,0.0\n"
    "304,1024,1536,7168,8,0,50.0,a8w8_3,18.25,578.88,0.0\n"
)
CSV_NEW = (
    "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n"
    "gfx950,256,64,256,5120,False,torch.bfloat16,torch.bfloat16,False,False,asm,5,13,7.9,x,0.0,21.19,417.92\n"
    "gfx950,256,64,256,5120,False,torch.bfloat16,torch.float32,False,False,hipblaslt,5,13,1.0,x,0.0,21.19,417.92\n"
    "gfx950,256,64,256,5120,True,torch.bfloat16,torch.bfloat16,False,False,hipblaslt,5,13,1.0,x,0.0,21.19,417.92\n"
)


def test_times_of_aiter(tmp_path: Path) -> None:
    old, new = tmp_path / "a8w8_blockscale_tuned_gemm_x.csv", tmp_path / "bf16_tuned_gemm.csv"
    old.write_text(CSV_OLD)
    new.write_text(CSV_NEW)
    tables = AiterTimes([old, new])
    asked = replace(ASKED, architecture="gfx942", units=304, shape=(("n", 1536), ("k", 7168)))

    def answer(request: Request) -> tuple[str, float | None] | None:
        found = list(tables.coverage(request))
        return (found[0].source, found[0].time_s) if found else None

    assert answer(replace(asked, rows=16)) == ("exact", pytest.approx(12.5e-6))  # the faster of two
    assert answer(replace(asked, rows=3)) == ("rows", None)  # padded to 16
    assert answer(replace(asked, rows=17)) is None  # padded to 32
    assert answer(replace(asked, rows=600)) == ("rows", None)  # neither 608, but the next power of two
    assert answer(replace(asked, rows=16, units=80)) is None
    assert answer(replace(asked, rows=16, flags=("rows",))) is None
    bf16 = Request("gemm", "gfx950", ("bfloat16",) * 2, (("n", 256), ("k", 5120)), 64, ("nt",), "MI355X", 256)
    assert answer(bf16) == ("exact", pytest.approx(7.9e-6))  # not with a bias or another result type
    assert [choice.implementation for choice in tables.coverage(bf16)] == ["aiter (asm)"]
    assert answer(replace(bf16, flags=("tn",))) is None
    assert list(tables.choices(bf16)) == []


@pytest.mark.parametrize(
    ("m", "expected"),
    [
        (1, (1, 16, 1)),
        (17, (17, 32, 32)),
        (257, (257, 288, 512)),
        (1025, (1025, 1088, 2048)),
        (4097, (4097, 4224, 8192)),
    ],
)
def test_padding(m: int, expected: tuple[int, int, int]) -> None:
    assert padded(m) == expected


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a8w8_blockscale_tuned_gemm.csv", "M,N,K,us\n", "no column cu_num"),
        ("a8w8_blockscale_tuned_gemm.csv", CSV_OLD + "304,x,1,1,1,0,1.0,k,1,1,0\n", "line 5: "),
        ("a8w8_blockscale_tuned_gemm.csv", CSV_OLD + "304\n", "line 5: "),
        ("fmoe.csv", CSV_OLD, "begin with a8w8_blockscale_tuned_gemm"),
        ("E=8,N=64,device_name=X.json", '{"one": {}}', "numbers of tokens"),
        ("E=8,N=64,device_name=X.json", '{"1": {"BLOCK_M": 16}}', "1: there is no BLOCK_SIZE_M"),
        ("E=8,N=64,device_name=X.json", "{}", "no configurations"),
        ("E=8,N=64,device_name=X.json", "[]", "no JSON object"),
        ("E=8,N=64,device_name=X.json", "{", "Expecting"),
    ],
)
def test_faults_of_files_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TableError) as found:
        Registry([path])
    assert str(found.value).startswith(f"{path}: ")
    assert words in str(found.value)


@pytest.mark.parametrize("body", [{"M_LEQ_x": {}}, {"any": 1}, {"any": {"BLOCK_SIZE_M": "64"}}, {"any": {"x": -1}}, []])
def test_faults_of_aiters_files_are_named(tmp_path: Path, body: Any) -> None:
    path = put(tmp_path, f"gemm/gfx950-{EIGHT}.json", body)
    with pytest.raises(TableError, match=path.name):
        Registry([tmp_path]).get(ASKED)


FUSED = {
    "1": (16, 16, 256, 1, 4, 2, 0, 16),
    "64": (32, 64, 128, 4, 4, 2, 0, 16),
    "4096": (128, 128, 128, 8, 8, 2, 0, 16),
}


def experts(root: Path, name: str) -> Path:
    body = {tokens: dict(zip(NAMES[:8], numbers, strict=True)) for tokens, numbers in FUSED.items()}
    return put(root, name, body | {"triton_version": "3.9.0"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("E=256,N=256,device_name=AMD_Instinct_MI325_OAM,dtype=fp8_w8a8,block_shape=[128,128].json",
         Name(256, 256, "AMD Instinct MI325 OAM", "fp8_w8a8", (128, 128))),
        ("E=8,N=14336,device_name=NVIDIA_H200.json", Name(8, 14336, "NVIDIA H200", None, None)),
        ("E=8,N=64,device_name=NVIDIA_H20-3e,dtype=int8_w8a16.json", Name(8, 64, "NVIDIA H20-3e", "int8_w8a16", None)),
        ("E=8,device_name=NVIDIA_H200.json", None),
        ("DEFAULT.json", None),
    ],
)  # fmt: skip
def test_names_of_vllm(name: str, expected: Name | None) -> None:
    assert parse_name(name) == expected


def test_vllm_is_looked_up_by_its_names(tmp_path: Path) -> None:
    path = experts(tmp_path, "E=8,N=64,device_name=NVIDIA_H200.json")
    tables = VllmConfigs([path])
    name = Name(8, 64, "NVIDIA H200", None, None)
    for tokens, rows in ((1, 16), (32, 16), (33, 32), (2080, 32), (2081, 128), (10**6, 128)):
        found = tables.look_up(name, tokens)
        assert found is not None
        assert found[0]["BLOCK_SIZE_M"] == rows
    for other in (
        name._replace(experts=4),
        name._replace(width=65),
        name._replace(device="NVIDIA H100"),
        name._replace(dtype="fp8_w8a8"),
        name._replace(block=(128, 128)),
    ):
        assert tables.look_up(other, 1) is None


def test_vllm_covers_and_lends_its_parameters(tmp_path: Path) -> None:
    experts(tmp_path, "E=8,N=2048,device_name=NVIDIA_H200.json")
    registry = Registry([tmp_path])
    shape = (("n", 4096), ("k", 7168), ("e", 8))
    asked = Request("grouped_gemm", "sm_90", ("bfloat16",) * 2, shape, 64, ("nt",), "NVIDIA H200", 132)
    down = replace(asked, shape=(("n", 7168), ("k", 2048), ("e", 8)))
    for request in (asked, down):
        covered = registry.coverage(request)
        assert (covered.implementation, covered.source) == ("vllm", "exact")
        own = registry.get(request)
        assert (own.implementation, own.source) == ("triton", "modelled")
        assert own.config.constants["BLOCK_M"] == 32
    for other in (
        replace(asked, device="NVIDIA H100"),
        replace(asked, flags=("nn",)),
        replace(asked, shape=(("n", 4096), ("k", 7168), ("e", 16))),
        replace(asked, shape=(("n", 4000), ("k", 7168), ("e", 8))),
    ):
        assert registry.coverage(other).implementation == "triton"


def test_vllm_counts_for_the_experts_width_and_the_rows_it_names(tmp_path: Path) -> None:
    experts(tmp_path, "E=8,N=4096,device_name=NVIDIA_H200.json")
    gate_up = (("n", 28672), ("k", 4096), ("e", 8))
    asked = Request("grouped_gemm", "sm_90", ("bfloat16",) * 2, gate_up, 64, ("nt",), "NVIDIA H200", 132)
    assert Registry([tmp_path], expert_width=14336).coverage(asked).implementation == "triton"
    experts(tmp_path, "E=8,N=14336,device_name=NVIDIA_H200.json")
    registry = Registry([tmp_path], expert_width=14336)
    assert [registry.coverage(replace(asked, rows=rows)).source for rows in (64, 512, 65536)] == [
        "exact",
        "rows",
        "rows",
    ]
    assert registry.coverage(asked).time_s is None


@pytest.mark.parametrize("us", ["-5", "0", "inf", "nan"])
def test_times_that_are_none_are_named_and_not_used(tmp_path: Path, us: str) -> None:
    path = tmp_path / "a8w8_blockscale_tuned_gemm.csv"
    path.write_text(CSV_OLD + f"304,32,1536,7168,8,0,{us},k,1,1,0\n")
    registry = Registry([path])
    asked = replace(ASKED, architecture="gfx942", units=304, shape=(("n", 1536), ("k", 7168)), rows=32)
    assert registry.others(asked) is None
    (doubt,) = registry.doubts
    assert "line 5: " in doubt
    assert Registry([tmp_path]).doubts == [doubt]


def test_parameters_are_carried_only_where_all_are_there() -> None:
    given = {name: number for name, number in block(64).items() if name != "NUM_KSPLIT"}
    own = carried(ASKED, given)
    assert own is not None
    assert own.constants["SPLIT"] == 1
    assert carried(ASKED, {name: number for name, number in given.items() if name != "BLOCK_SIZE_N"}) is None
    assert carried(replace(ASKED, kernel="glu_forward", shape=(("f", 64),)), given) is None
    assert look_up.get(ASKED).implementation == "triton"
