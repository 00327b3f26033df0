"""The models and versions that an engine serves, by name."""
