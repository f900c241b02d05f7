"""Runs collectors: finds them, schedules them, and keeps those that may block in worker processes."""
