"""The decisions of the executor: synchronous, FIFO, and told the time; no I/O, no clock, no trio."""
