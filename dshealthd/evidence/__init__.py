"""Evidence of a hang: what is kept of a job that stands still, in one directory, before somebody ends it."""
