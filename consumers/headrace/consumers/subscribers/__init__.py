"""Subscribers to topics: events by their types, and weights into an engine."""
