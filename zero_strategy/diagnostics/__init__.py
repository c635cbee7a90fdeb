"""Checks of a run: proof that it trains what one process trains, who is slow, what differs, what is not finite.

It observes engines from outside, through hooks that it registers; nothing in the training path imports it.
"""
