"""Sampling with a model in this process."""
