"""Migrations of idemp's tables."""
