"""The checks of a job about to start: `checks` lists them; `sources` reads what describes the
job.
"""
