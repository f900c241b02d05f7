"""What a job is started from: configuration, hostfile, launcher command, script, checkpoint.

Users write all of these, so nothing here trusts them: each is read with its owner's rights in a
process that can be killed, up to a bound, and nothing that a file says is ever run.
"""
