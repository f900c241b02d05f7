"""PyTorch's CUDA build on genuine NCCL and the simulated CUDA runtime."""
