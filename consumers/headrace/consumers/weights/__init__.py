"""The way of weights into a rollout engine."""
