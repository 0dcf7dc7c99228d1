"""Whether quantizing pays on this machine: the warning and its reason."""

from __future__ import annotations

import pytest

from qwenonnx.bench.measure import Measurement
from qwenonnx.bench.speedup import Int8Flags, Speedup, short_workload, slowness_warning
from qwenonnx.runtime.cpu import CpuInfo

HASWELL = CpuInfo("Haswell", ("avx2",))
ICE_LAKE = CpuInfo("Ice Lake", ("avx2", "avx512f", "avx512_vnni"))
GRAVITON = CpuInfo("Neoverse", ("asimddp", "i8mm", "sve"))


def speedup(decode: float, source: float) -> Speedup:
    package, base = (
        Measurement(40, 16, ttft=0.1, prefill_rate=400.0, decode_rate=rate, itl_p50=0.1, itl_p95=0.1)
        for rate in (decode, source)
    )
    return Speedup.of(package, base)


@pytest.mark.parametrize(
    ("cpu", "machine", "present", "missing"),
    [
        (HASWELL, "x86_64", ("avx2",), ("avx512f", "avx512_vnni", "avx_vnni", "amx_int8")),
        (ICE_LAKE, "AMD64", ("avx2", "avx512f", "avx512_vnni"), ("avx_vnni", "amx_int8")),
        (GRAVITON, "aarch64", ("asimddp", "i8mm"), ()),
        (CpuInfo("unknown", ()), "arm64", (), ("asimddp", "i8mm")),
    ],
)
def test_flags_are_those_of_the_processors_family(
    cpu: CpuInfo, machine: str, present: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    assert Int8Flags.of(cpu, machine) == Int8Flags(present, missing)


def test_a_faster_package_needs_no_warning() -> None:
    assert speedup(30, 15).decode == 2
    assert slowness_warning(speedup(30, 15), "int8", HASWELL, Int8Flags.of(HASWELL, "x86_64")) is None


@pytest.mark.parametrize("source", [15.0, 20.0])
def test_one_that_is_no_faster_is_explained_by_what_the_cpu_lacks(source: float) -> None:
    warning = slowness_warning(speedup(15, source), "int8", HASWELL, Int8Flags.of(HASWELL, "x86_64"))

    assert warning is not None
    assert f"int8 does not decode faster than its source on this machine (15.0 against {source:.1f} tokens" in warning
    assert "has avx2 and lacks avx512f, avx512_vnni, avx_vnni, amx_int8" in warning
    assert "8-bit products are slow" in warning


def test_a_cpu_with_fast_products_is_not_blamed() -> None:
    warning = slowness_warning(speedup(15, 20), "int8", ICE_LAKE, Int8Flags.of(ICE_LAKE, "x86_64"))

    assert warning is not None
    assert "has avx2, avx512f, avx512_vnni and lacks avx_vnni, amx_int8" in warning
    assert "products are fast" in warning


def test_a_cpu_without_any_known_flag_can_be_described() -> None:
    nothing = CpuInfo("unknown", ())

    warning = slowness_warning(speedup(1, 2), "int4", nothing, Int8Flags.of(nothing, "aarch64"))

    assert warning is not None
    assert "has none of the known instruction sets and lacks asimddp, i8mm" in warning


def test_the_source_is_measured_shortly_after_the_shortest_prompt() -> None:
    workload = short_workload((512, 40))

    assert workload.prompt_lengths == (40,)
    assert workload.repeats == 1
    assert workload.new_tokens <= 16
