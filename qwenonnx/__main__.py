"""Lets `python -m qwenonnx` do what the `qwenonnx` command does."""

from qwenonnx.cli.main import main

if __name__ == "__main__":
    main()
