"""One step: which groups, what the ranks are told, the turn at the device, its files, and running it again."""
