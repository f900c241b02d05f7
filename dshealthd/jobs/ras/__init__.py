"""What NCCL's RAS subsystem tells of a job, and how it is asked."""
