"""Optimizers, their learning-rate schedules, and gradient clipping."""
