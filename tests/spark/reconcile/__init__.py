"""Reconciliation: what was sent, handled, produced and confirmed."""
