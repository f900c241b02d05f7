"""Tests of the processes that run collectives."""
