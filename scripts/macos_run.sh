#!/bin/sh
# DreamerV3's launcher in our words: `./scripts/macos_run.sh dreamerv3/main.py --configs defaults grpo_config …`
# is `grpo train --configs defaults grpo_config …`. The name of a Python file, if one comes first, is left out.
case "$1" in *.py) shift ;; esac
exec "${GRPO:-grpo}" train "$@"
