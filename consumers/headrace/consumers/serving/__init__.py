"""Which models and versions an engine of Headrace serves."""
