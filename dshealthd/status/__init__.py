"""`dshealthd status` and `dshealthd jobs`: what agents say of their nodes, in a terminal.

`query` asks the agents, `text` writes for people, `command` does what the command line asks for.
"""
