"""Splash-TRT: serves MLA models under four attention layouts, and switches between them while requests run."""

__version__ = "0.1.0"
