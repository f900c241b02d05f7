"""NVIDIA's management library: its session in the device worker, and what the GPU collectors share."""
