"""Tests of calls between agents."""
