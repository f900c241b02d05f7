"""Evidence of a hang: a directory of what is known about a hung job, kept before somebody ends it."""
