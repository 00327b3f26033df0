"""Decoding, tokenizing and judging of groups, in a process of its own."""
