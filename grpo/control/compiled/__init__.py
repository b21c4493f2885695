"""One compiled loop for environments that are functions: play, compare and learn in one program of JAX's."""
