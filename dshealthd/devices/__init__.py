"""Libraries that talk to devices; used in worker processes only."""
