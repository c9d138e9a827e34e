"""Settings of the kernel tests: as for the adapters, one thread and the same seed before each test."""

from adapters.conftest import one_thread

__all__ = ["one_thread"]
