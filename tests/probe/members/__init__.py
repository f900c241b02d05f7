"""Tests of who takes part, and who meets whom."""
