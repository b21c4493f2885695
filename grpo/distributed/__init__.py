"""Several processes, one run: how they find each other, and how what they say travels."""
