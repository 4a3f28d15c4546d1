"""The package's version, for those that may not import the package as a whole."""

__version__ = "0.1.0"
