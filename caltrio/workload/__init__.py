"""Requests: read from traces, made up by named random streams, and replayed against an executor."""
