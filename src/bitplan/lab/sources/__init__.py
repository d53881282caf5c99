"""Readers of public data sets in their own formats, from local folders. No file that is read is executed."""
