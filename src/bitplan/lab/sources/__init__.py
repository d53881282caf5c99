"""Readers of public data sets in their own formats, from folders on this machine. Nothing that is read executes."""
