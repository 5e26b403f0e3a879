"""The connections to an upstream; bytes in, pushed response steps out.  No dialect, no queue."""
