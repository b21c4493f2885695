"""The composition root: settings files, presets, tasks and checks before a run. No mathematics, no sampling."""
