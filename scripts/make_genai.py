"""Makes the folders that onnxruntime-genai's builder writes for CPUs, for `qwenonnx adopt`, and prints their paths.

Usage: python scripts/make_genai.py CHECKPOINT OUTPUT [--precision int4 --precision fp32] [--environment FOLDER]

CHECKPOINT is a folder with config.json, tokenizer and safetensors. The builder needs torch and another version of
transformers than this project, so it gets a virtual environment of its own in FOLDER (default: OUTPUT/.venv), made by
the first run and used again by later ones. Of the results, OUTPUT/genai-int4 and so on, nothing is changed after.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

# The builder imports classes of transformers 5; the versions are those that were tried together.
REQUIREMENTS = ("onnxruntime-genai==0.18.0", "onnx-ir==1.1.0", "onnx==1.23.2", "torch==2.13.0", "transformers==5.24.0")
BUILDER = "onnxruntime_genai.models.builder"
PRECISIONS = ("int4", "fp32")


def main() -> int:
    """Makes the environment and the folders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("output", metavar="OUTPUT", type=Path)
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="repeatable; default: both")
    parser.add_argument("--environment", metavar="FOLDER", type=Path)
    arguments = parser.parse_args()
    checkpoint: Path = arguments.checkpoint.absolute()
    if not (checkpoint / "config.json").is_file():
        parser.error(f"{checkpoint}: there is no config.json; name a folder with a safetensors checkpoint")
    output: Path = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    python = environment(arguments.environment or output / ".venv")
    for precision in arguments.precision or PRECISIONS:
        folder = output / f"genai-{precision}"
        if not (folder / "genai_config.json").is_file():
            build(python, checkpoint, folder, precision)
        print(folder)
    return 0


def environment(folder: Path) -> Path:
    """The interpreter of a virtual environment with the builder; makes it where there is none."""
    python = folder.absolute() / "bin" / "python"
    done = folder / "complete"
    if not done.is_file():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True, stdout=sys.stderr)
        done.touch()
    return python


def build(python: Path, checkpoint: Path, folder: Path, precision: str) -> None:
    """Runs the builder; its own messages go to stderr."""
    cache = folder.with_name(f".{folder.name}-cache")
    options = ["-i", checkpoint, "-o", folder, "-p", precision, "-e", "cpu", "-c", cache]
    line = [str(part) for part in (python, "-m", BUILDER, *options)]
    # The checkpoint is on disk, so the hub is not asked.
    subprocess.run(line, check=True, stdout=sys.stderr, env={**os.environ, "HF_HUB_OFFLINE": "1"})


if __name__ == "__main__":
    sys.exit(main())
