"""HTTP as the commands and the servers share it."""
