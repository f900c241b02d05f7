"""Queries to NCCL's RAS subsystem, and its answers about a job."""
