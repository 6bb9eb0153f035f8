"""Faults of the product, each with the test that catches it: what tests are worth shows when something is wrong."""
