"""A model's life: loading, adapters, the reference beside it, its optimizer, a warm start, what is saved."""
