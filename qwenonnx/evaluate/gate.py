"""The gate that every quantized package has to pass: a short evaluation against what it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qwenonnx.errors import NumericalError
from qwenonnx.evaluate.fidelity import Encoder, Scorer, measure_fidelity
from qwenonnx.evaluate.metrics import Comparison
from qwenonnx.evaluate.texts import EvaluationText
from qwenonnx.files import Progress

# Of each text; enough to tell a damaged model from a whole one in a few seconds.
GATE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class GateLimits:
    """The worst that a package may be: mean KL divergence from its source, and agreement on the likeliest token."""

    kl_mean: float
    top1_agreement: float


@dataclass(frozen=True, slots=True)
class GateResult:
    """What was measured (nothing, where logits were unusable), the limits, and why the package failed, if it did."""

    limits: GateLimits
    measured: Comparison | None
    failure: str | None

    @property
    def passed(self) -> bool:
        """Whether the package may be used."""
        return self.failure is None

    def to_json(self) -> dict[str, Any]:
        """The result as plain data, for the manifest."""
        figures: dict[str, Any] = {}
        if self.measured is not None:
            figures = {
                "kl_mean": self.measured.kl_mean,
                "top1_agreement": self.measured.top1_agreement,
                "perplexity": self.measured.perplexity,
                "reference_perplexity": self.measured.reference_perplexity,
                "positions": self.measured.positions,
            }
        return {"passed": self.passed, "failure": self.failure, "limits": asdict(self.limits), **figures}


def run_gate(
    reference: Scorer,
    candidate: Scorer,
    encoder: Encoder,
    texts: Sequence[EvaluationText],
    limits: GateLimits,
    progress: Progress | None = None,
) -> GateResult:
    """Measures a package on the beginnings of some texts. NaN and flat logits fail whatever the limits are."""
    try:
        report = measure_fidelity(reference, candidate, encoder, texts, max_tokens=GATE_TOKENS, progress=progress)
    except NumericalError as error:
        return GateResult(limits, None, f"its logits are unusable ({error})")
    return GateResult(limits, report.overall, _failure(report.overall, limits))


def _failure(measured: Comparison, limits: GateLimits) -> str | None:
    if measured.is_flat:
        return "its predictions are as good as uniform"
    if not measured.kl_mean <= limits.kl_mean:
        return f"its mean KL from the input is {measured.kl_mean:.4f}, above the limit of {limits.kl_mean:g}"
    if measured.top1_agreement < limits.top1_agreement:
        return (
            f"it agrees with the input on the likeliest token at {measured.top1_agreement:.1%} of the positions, "
            f"below the limit of {limits.top1_agreement:.0%}"
        )
    return None
