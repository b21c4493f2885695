"""What readers of five documents about GRPO type, line by line: it works here, or says what to write instead."""
