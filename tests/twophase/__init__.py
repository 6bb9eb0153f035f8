"""Handlings in several databases."""
