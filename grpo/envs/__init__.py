"""Environments: several copies stepped together, their spaces, action heads, snapshots and videos. No algorithm."""
