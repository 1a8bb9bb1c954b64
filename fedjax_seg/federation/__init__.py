"""How a federation runs: who takes part, how clients are executed, one round, evaluation.

Receives Client, Aggregator and Task as values and imports none of those rooms.
"""
