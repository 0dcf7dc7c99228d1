"""qwenonnx: Qwen2-0.5B as ONNX, quantized faithfully and served fast on ordinary CPUs."""

__version__ = "0.1.0"
