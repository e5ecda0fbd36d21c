"""Tokens of one choice -> pieces: incremental text, stop strings, think and response channels.

A pure state machine: the same tokens give the same pieces however they arrive. Text that could be
the start of a stop string waits; the token that completes one ends the choice.
"""
