"""Writing the decoder as an ONNX graph."""
