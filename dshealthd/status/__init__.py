"""`dshealthd status` and `dshealthd jobs`: the state of nodes, in a terminal.

`query` queries the agents, `text` formats their answers, `command` implements both commands.
"""
