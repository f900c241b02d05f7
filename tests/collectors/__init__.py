"""Tests of the collectors, by module."""
