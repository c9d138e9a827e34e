"""The frozen plan, and swapping attention for kernels with an undo."""
