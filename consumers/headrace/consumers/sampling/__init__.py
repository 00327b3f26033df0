"""An engine in the process of whoever samples: one base model, several policies."""
