"""NVML: its session in the device worker, and the base of the GPU collectors."""
