"""The sources from which a job starts: configuration, hostfile, launcher command, checkpoint.

Users write all of these, so nothing here trusts them: each is read up to a limit with its owner's
rights in a process that can be killed, and nothing in a file is ever run.
"""
