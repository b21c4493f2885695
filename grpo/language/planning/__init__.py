"""What a step will take of a GPU, memory and time by part, from a model's config alone: before anything is loaded."""
