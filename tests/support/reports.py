"""Strings that a page must escape."""

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u202e\u2028\x00\x1b[31m\ud800\"'"
