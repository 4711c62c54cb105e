"""Virtual time: the production core among modelled engines, links and faults."""
