"""aiogw: the front door of a self-hosted LLM cluster.  Only the version lives here."""

__version__ = "0.1.0"
