"""The files of steps in the object store: stored, kept by policy, collected."""
