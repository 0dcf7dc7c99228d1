"""Whether quantizing a package has made it faster on this machine, and what its CPU has to do with it."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from qwenonnx.bench.measure import Measurement, Workload
from qwenonnx.runtime.cpu import CpuInfo

# Long enough to tell twice as fast from half as fast, short enough to be run beside every measurement.
COMPARED_TOKENS = 16
X86_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
ARM_FLAGS = ("asimddp", "i8mm")


@dataclass(frozen=True, slots=True)
class Int8Flags:
    """The instruction sets that make 8-bit products fast: those that this CPU has, and those that it has not."""

    present: tuple[str, ...]
    missing: tuple[str, ...]

    @classmethod
    def of(cls, cpu: CpuInfo, machine: str | None = None) -> Int8Flags:
        """Sorts the flags of `machine`'s family of processors (default: this one's)."""
        arm = (machine or platform.machine()).lower() in ("aarch64", "arm64")
        known = ARM_FLAGS if arm else X86_FLAGS
        return cls(
            tuple(flag for flag in known if flag in cpu.flags), tuple(flag for flag in known if flag not in cpu.flags)
        )


@dataclass(frozen=True, slots=True)
class Speedup:
    """A package beside its source, after prompts of one length; rates are tokens per second."""

    prompt_tokens: int
    decode_rate: float
    prefill_rate: float
    source_decode_rate: float
    source_prefill_rate: float

    @classmethod
    def of(cls, package: Measurement, source: Measurement) -> Speedup:
        """Compares two measurements of prompts of the same length."""
        return cls(
            package.prompt_tokens,
            package.decode_rate,
            package.prefill_rate,
            source.decode_rate,
            source.prefill_rate,
        )

    @property
    def decode(self) -> float:
        """How many times as fast the package decodes."""
        return self.decode_rate / self.source_decode_rate

    @property
    def prefill(self) -> float:
        """How many times as fast it reads the prompt."""
        return self.prefill_rate / self.source_prefill_rate


def short_workload(prompt_lengths: tuple[int, ...]) -> Workload:
    """What the source is measured with: the shortest prompt, a few tokens, twice, of which the first warms up."""
    return Workload((min(prompt_lengths),), COMPARED_TOKENS, repeats=1)


def slowness_warning(speedup: Speedup, recipe: str, cpu: CpuInfo, flags: Int8Flags) -> str | None:
    """One sentence where the package decodes no faster than its source, with what the CPU has and lacks; else None."""
    if speedup.decode > 1:
        return None
    rates = f"{speedup.decode_rate:,.1f} against {speedup.source_decode_rate:,.1f} tokens a second"
    has = f"this CPU has {_listed(flags.present)} and lacks {_listed(flags.missing)}"
    if cpu.has_int8_dot:
        reason = "so that its 8-bit products are fast, and something else slows it down (a busy machine, a tiny model)"
    else:
        reason = "so that its 8-bit products are slow; serve the source, or try another recipe"
    return f"{recipe} does not decode faster than its source on this machine ({rates}): {has}, {reason}."


def _listed(flags: tuple[str, ...]) -> str:
    return ", ".join(flags) or "none of the known instruction sets"
