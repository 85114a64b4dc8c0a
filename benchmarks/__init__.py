"""Benchmarks, run from the root: a file for each question, one timing loop, one form of results."""
