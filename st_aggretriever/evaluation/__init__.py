"""Evaluation: metrics with their rules, one benchmark a file."""
