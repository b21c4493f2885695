"""Data: rows of a file or hub data set, their columns, chat templates, prompts in an order that can be resumed."""
