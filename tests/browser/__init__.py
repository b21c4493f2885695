"""The viewer as a person meets it: a real Chromium against a real server over real run folders."""
