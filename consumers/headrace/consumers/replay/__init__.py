"""Steps run again, or groups copied, for a person."""
