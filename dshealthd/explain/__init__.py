"""`dshealthd explain`: finds the cause, rank, host and first step of a job's failure in its
logs.
"""
