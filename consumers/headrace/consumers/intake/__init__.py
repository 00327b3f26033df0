"""From bytes to groups: decoded, tokenized and judged, in a process of its own where that takes long."""
