"""What only real GPUs can show, as one command: `make test-hardware`."""
