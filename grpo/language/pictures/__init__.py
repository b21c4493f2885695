"""Prompts that hold images.

    a row's images ─► Picture: a reference (pairing.py, reading.py) ─► the tokens it takes, by its size (processor.py)
                   ─► PicturedIds: token ids with the pictures they stand for (ids.py)
                   ─► tensors, when a model reads them, let go again ─► the module's arguments (features.py)

Nobody else knows about images: data gives `PicturedIds`, an engine and the scorer hand them to `features.arguments`.
"""
