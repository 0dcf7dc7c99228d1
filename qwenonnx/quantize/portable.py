"""Quantizing graphs of other exporters with onnxruntime's own quantizer."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import onnx

from qwenonnx.errors import QuantizeError, QwenonnxError
from qwenonnx.files import Progress
from qwenonnx.package.manifest import DATA_NAME, MODEL_NAME
from qwenonnx.package.package import Package
from qwenonnx.quantize.calibration_reader import PastStatesReader
from qwenonnx.quantize.calibration_texts import calibration_ids
from qwenonnx.quantize.exclusion import Linear
from qwenonnx.quantize.portable_linears import OPERATORS, PortableGraph, fp32_linears
from qwenonnx.quantize.recipes import PortableRecipe
from qwenonnx.runtime.ort import load_onnxruntime
from qwenonnx.runtime.session import SessionConfig, open_session

WORK = ".work"
# Without it the quantizer asks, on stderr, for a step that needs sympy and makes no difference here.
PREPROCESSED = ("onnx.quant.pre_process", "onnxruntime.quant")


def portable_bytes(source: Package, graph: PortableGraph, recipe: PortableRecipe, kept: Sequence[Linear]) -> int:
    """Upper bound of the bytes that are on disk at once: the result, and copies of the source on the way."""
    copies = 2 if recipe.calibrate else 1
    quantized = sum(linear.weights for linear in graph.linears) - sum(linear.weights for linear in kept)
    return copies * _graph_bytes(source) + _graph_bytes(source) - int(2.9 * quantized)


def write_portable(
    source: Package,
    folder: Path,
    graph: PortableGraph,
    recipe: PortableRecipe,
    kept: Sequence[Linear],
    texts: Sequence[Path],
    stage: Callable[[str], Progress],
) -> None:
    """Writes graph and data into `folder`; `texts` replace the bundled calibration texts, if there are any.

    onnxruntime's quantizer holds the whole model in memory, and writes beside its input and to the system's temporary
    folder: it gets a copy to work on, and that folder is in `folder` while it runs.

    Raises:
        QuantizeError: the quantizer failed or left linears as they were, or the graph cannot be calibrated.
        UsageError: a calibration text cannot be read.
    """
    load_onnxruntime()  # before anything below imports a part of it
    work = folder / WORK
    work.mkdir()
    model = _copy(source, graph, work)
    # The second name is that of what the quantizer makes of a Gemm.
    excluded = [name for linear in kept for name in (linear.name, f"{linear.name}_MatMul")]
    with _quiet_quantizer(work):
        try:
            if recipe.calibrate:
                _quantize_static(source, model, folder, graph, recipe, excluded, texts, stage)
            else:
                stage("quantizing")
                _quantize_dynamic(model, folder, recipe, excluded)
        except (QwenonnxError, OSError, MemoryError):
            raise
        except Exception as error:  # what it raises on an unusual graph is of any class
            reason = " ".join(str(error).split()) or type(error).__name__
            raise QuantizeError(
                f"{source.model_path}: onnxruntime's quantizer cannot take this graph ({reason})."
            ) from error
    shutil.rmtree(work)
    _finish(source, folder, recipe, excluded)


def _quantize_dynamic(model: Path, folder: Path, recipe: PortableRecipe, excluded: list[str]) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        model,
        folder / MODEL_NAME,
        op_types_to_quantize=list(OPERATORS),
        per_channel=recipe.per_channel,
        reduce_range=recipe.reduce_range,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=excluded,
        use_external_data_format=True,
        extra_options={"MatMulConstBOnly": True, "DefaultTensorType": onnx.TensorProto.FLOAT},
    )


def _quantize_static(
    source: Package,
    model: Path,
    folder: Path,
    graph: PortableGraph,
    recipe: PortableRecipe,
    excluded: list[str],
    texts: Sequence[Path],
    stage: Callable[[str], Progress],
) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    ids = calibration_ids(source, texts)
    session = open_session(source.model_path, SessionConfig.for_one_run())
    quantize_static(
        model,
        folder / MODEL_NAME,
        PastStatesReader(source, session, ids, stage("calibrating and quantizing")),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=list(OPERATORS),
        per_channel=recipe.per_channel,
        reduce_range=recipe.reduce_range,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=[*excluded, *graph.other_products()],
        use_external_data_format=True,
        # Only inputs are quantized: outputs go to norms, softmax and sums, which are in fp32.
        extra_options={
            "OpTypesToExcludeOutputQuantization": list(OPERATORS),
            "DefaultTensorType": onnx.TensorProto.FLOAT,
        },
    )


def _graph_bytes(source: Package) -> int:
    manifest = source.manifest
    return sum(manifest.files[name].bytes for name in (manifest.model_file, *manifest.data_files))


def _copy(source: Package, graph: PortableGraph, work: Path) -> Path:
    """The graph with its weights in `work`; onnx reads none through links."""
    for name in graph.data_files:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.model_path.parent / name, work / name)
    key, value = PREPROCESSED
    graph.model.metadata_props.add(key=key, value=value)
    path = work / "source.onnx"
    path.write_bytes(graph.model.SerializeToString())
    return path


@contextlib.contextmanager
def _quiet_quantizer(work: Path) -> Iterator[None]:
    """Keeps the quantizer's temporary files in `work`, and its log to itself."""
    before = tempfile.tempdir, logging.root.manager.disable
    tempfile.tempdir = str(work)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        logging.disable(before[1])


def _finish(source: Package, folder: Path, recipe: PortableRecipe, excluded: list[str]) -> None:
    """Replaces the quantizer's marks by the recipe, and lets everybody read the data, as the other files.

    Raises:
        QuantizeError: the quantizer passed over linears without a word.
    """
    path = folder / MODEL_NAME
    model = onnx.load(str(path), load_external_data=False)
    if left := [name for name in fp32_linears(model) if name not in excluded]:
        raise QuantizeError(
            f"{source.model_path}: onnxruntime's quantizer left {len(left)} linears in fp32, such as {left[0]}; "
            "leave them out with --exclude if they are not to be quantized."
        )
    del model.metadata_props[:]
    model.metadata_props.add(key="recipe", value=recipe.name)
    path.write_bytes(model.SerializeToString(deterministic=True))
    data = folder / DATA_NAME
    if data.is_file():  # a small graph has none
        data.chmod(path.stat().st_mode & 0o777)
