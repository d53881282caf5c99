"""Comparisons: one task under several plans and seeds, each run in a folder of its own."""
