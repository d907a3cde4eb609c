"""Tests, one package a part of stemkv. Names say what holds."""
