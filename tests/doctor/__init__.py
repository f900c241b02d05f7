"""Tests of `dshealthd doctor`."""
