"""From the logs of a job that failed to its cause, rank, host and remedy: `dshealthd explain`."""
