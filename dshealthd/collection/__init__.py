"""Finds, schedules and runs collectors; those that may block run in worker processes."""
