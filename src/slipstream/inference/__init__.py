"""Serving: from a request's text to its tokens. Read `core` first, then `engine`."""
