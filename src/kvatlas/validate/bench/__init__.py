"""`kvatlas bench`: the simulator's traces as live load, several configurations side by side."""
