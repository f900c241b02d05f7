"""NCCL's inputs and outputs: its environment variables, and the files of its Inspector."""
