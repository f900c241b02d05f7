"""The command line: parsing, and the commands that have no package of their own."""
