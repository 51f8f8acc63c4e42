"""Metrics on disk, and their way to MLflow."""
