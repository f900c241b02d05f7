"""What NCCL reads and writes: its environment variables, and the files of its Inspector."""
