"""Which models and versions an engine of ours serves."""
