"""The machine: devices, memory, versions."""
