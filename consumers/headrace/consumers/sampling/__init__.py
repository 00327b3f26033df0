"""An engine in the process of the process that samples: one base model, several policies."""
