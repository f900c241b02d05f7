"""Evidence of a hang: a directory with the state of a hung job, kept before somebody ends it."""
