"""`dshealthd explain`: finds the cause, rank, host and remedy of a job's failure in its logs."""
