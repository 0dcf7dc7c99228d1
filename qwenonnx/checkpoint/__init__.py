"""Reading checkpoints: safetensors folders and GGUF files."""
