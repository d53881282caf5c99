"""The one place the version is written; packaging and the command line both read it here."""

__version__ = "0.1.0"
