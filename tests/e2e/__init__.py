"""Whole services on real servers."""
