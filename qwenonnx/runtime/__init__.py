"""Running a package in onnxruntime: threads, session, KV cache."""
