"""The version, in one place: the package, the build and the first line of every log read it here."""

__version__ = "0.1.0"
