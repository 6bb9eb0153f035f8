"""Metrics for Prometheus and spans of OpenTelemetry, by the hooks of a worker. Each has an extra of its own."""
