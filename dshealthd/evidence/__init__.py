"""Evidence of a hang: what is kept of a job that is hung, in one directory, before somebody
ends it.
"""
