"""Tests of the format, the keys and the pool."""
