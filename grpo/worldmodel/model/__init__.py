"""The world model: recurrence, networks, distributions, its losses and its optimizer."""
