"""littlelm_core: the trainer that the chapters of littlelm build, test and export."""

__version__ = "0.1.0"
