"""Moves bytes between the tiers of a node and beyond it; decides nothing."""
